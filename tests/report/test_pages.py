"""Page and terminal tables from synthetic runs: what they say, and what they may not say."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tests.report.synthetic import data, step
from vime.errors import InputError
from vime.report.html import render_html
from vime.report.numbers import decimal, seconds, size, tick_label, ticks
from vime.report.summary import RunSummary
from vime.report.terminal import render_terminal

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def summary(**changes):
    return RunSummary.from_data(**data(**changes))


def text_of(value):
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(render_terminal(value))
    return console.file.getvalue()


def broken():
    return [
        step(0),
        step(1, mismatch_count=3, distribution_mismatch_count=5, max_abs_diff=1e-7,
             worst_token={"sample": "train/40/2", "position": 9}),
        step(2),
    ]  # fmt: skip


def silent():
    nothing = {"mismatch_count": None, "distribution_mismatch_count": None, "max_abs_diff": None}
    return step(1, compared_tokens=0, incomparable_tokens={"weight_version": 320}, **nothing)


def test_a_clean_run_says_how_much_was_compared():
    run = summary()
    verdict = run.verdict()
    assert (verdict.tone, verdict.headline) == ("good", "10,946 tokens compared, 0 differing")
    assert verdict.headline in render_html(run) and verdict.headline in text_of(run)


def test_a_mismatch_is_the_headline_and_names_its_step():
    run = summary(steps=broken())
    verdict = run.verdict()
    assert verdict.tone == "bad" and verdict.headline.endswith("5 differing")
    assert "3 log-probabilities and 5 distributions differ, in step 1" in verdict.details
    page = render_html(run)
    assert "train/40/2 at 9" in page and "verdict bad" in page and "verdict good" not in page


def test_distributions_alone_are_enough_to_fail():
    assert summary(steps=[step(0, distribution_mismatch_count=1)]).verdict().tone == "bad"


def test_steps_that_compared_nothing_take_the_green_away():
    run = summary(steps=[step(0), silent()])
    verdict = run.verdict()
    assert verdict.tone == "unknown" and "step 1 compared nothing" in verdict.details
    assert any(d.startswith("320 tokens were not comparable") for d in verdict.details)
    assert "unknown" in text_of(run) and '<span class="unknown">unknown</span>' in render_html(run)


@pytest.mark.parametrize("steps", [[], [silent()]])
def test_nothing_compared_is_never_zero_differing(steps):
    run = summary(steps=steps)
    assert run.verdict().tone == "unknown" and run.verdict().headline == "Nothing was compared"
    for text in (render_html(run), text_of(run)):
        assert "0 differing" not in text and "Nothing was compared" in text


def test_sides_with_other_identities_are_no_clean_run():
    sides = data()["identities"]
    sides["engine-0"] = {**sides["engine-0"], "numerical_policy": "00" * 32}
    run = summary(identities=sides)
    assert run.verdict().tone == "unknown" and run.identity_differences == ("numerical_policy",)
    assert '<span class="some">differs</span>' in render_html(run)
    assert "No identities were recorded" in render_html(summary(identities={}))


def test_an_evaluation_of_nothing_is_said_and_never_zero():
    evaluations = [{"step": 0, "reward_mean": None, "num_samples": 0}, {"step": 34, "reward_mean": 0.5}]
    run = summary(evaluations=evaluations)
    assert "the evaluation after 0 steps evaluated nothing" in run.verdict().details
    assert "unknown: nothing was evaluated" in text_of(run)
    page = render_html(run)
    assert '<span class="from">– →</span> 0.50<' in page and "evaluated nothing" in page
    assert "evaluated nothing" not in render_html(summary())


def test_nonfinite_values_are_said():
    verdict = summary(steps=[step(0, nonfinite_count=2)]).verdict()
    assert verdict.tone == "unknown" and "2 compared log-probabilities were infinite or NaN" in verdict.details


@pytest.mark.parametrize(
    "changes",
    [{}, {"steps": [step(0)]}, {"steps": []}, {"steps": broken(), "evaluations": []}, {"contract": {}, "evidence": {}},
     {"steps": [step(0), silent()]}],
    ids=["clean", "one step", "none", "broken", "bare", "silent"],
)  # fmt: skip
def test_the_page_is_well_formed_and_loads_nothing(changes):
    page = render_html(summary(**changes))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", page)
    assert not [name for name, _ in parser.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"\bnan\b|\binf\b|None", page)


def test_text_from_a_run_is_escaped():
    run = summary(name="<script>x</script>", reason="a & <b>", status="stopped", facts={"<k>": '"v"'})
    page = render_html(run)
    assert "<script>x" not in page and "&lt;script&gt;x" in page and "a &amp; &lt;b&gt;" in page and "<k>" not in page


def shown_at(width, value):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(render_terminal(value))
    return console.file.getvalue()


LARGE = [
    step(
        n,
        compared_tokens=1_234_567,
        num_tokens=1_299_999,
        incomparable_tokens={"kv_version": 65_432},
        reward_mean=0.5 + n / 1e5,
        mismatch_count=123_456,
        distribution_mismatch_count=234_567,
        max_abs_diff=1.25e-7,
        tokens_per_s=123_456.7,
        loss=-4.04e-9,
        grad_norm=123.456,
        weight_version=1200 + n,
        time_s={**step(n)["time_s"], "total": 7300.0},
    )
    for n in (1198, 1199)
]
FIGURES = {"1198", "0.512", "1,234,567 (+65,432 not)", "123,456", "234,567"}


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("steps", [LARGE, [step(n) for n in range(34)]], ids=["large", "usual"])
def test_no_number_is_cut_at_any_width(width, steps):
    text = shown_at(width, summary(steps=steps))
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    if steps is LARGE:
        table = text[text.index("Steps") : text.index("Time")]
        assert [figure for figure in FIGURES if figure not in table] == []
        assert "1.25e-07" in table or width < 100
    header = next(line for line in text.splitlines() if "compared" in line and "differ" in line and "step" in line)
    for name in ("step", "reward", "compared", "differ", "distr."):
        assert name in header
    assert ("version" in header) == (width == 200 or "a wider terminal shows version" not in text)


def test_a_very_narrow_terminal_gets_paragraphs_with_every_figure():
    text = " ".join(shown_at(40, summary(steps=LARGE)).split())
    for figure in ("step 1198", "version 2398", "compared 1,234,567 (+65,432 not)", "differ 123,456",
                   "distr. 234,567", "max |diff| 1.25e-07", "grad norm 123", "tok/s 123,457"):  # fmt: skip
        assert figure in text
    assert "…" not in text


def test_what_is_left_out_is_said_and_the_difference_is_never_what_is_left_out_first():
    clean, broken_run = shown_at(80, summary(steps=[step(0)])), shown_at(80, summary(steps=broken()))
    assert "a wider terminal shows" in clean
    assert "max |diff|" not in clean[clean.index("┡") :].split("a wider")[0]
    assert "1.00e-07" in broken_run
    assert "a wider terminal" not in shown_at(200, summary())


def test_a_native_run_does_not_look_like_one_that_proved_something():
    sides = data()["identities"]
    sides["engine-0"] = {**sides["engine-0"], "numerical_policy": "00" * 32}
    for steps in ([step(0)], broken()):
        run = summary(identities=sides, native=("rollout",), steps=steps)
        verdict = run.verdict()
        assert verdict.tone == ("unknown" if steps != broken() else "bad")
        assert any("the rollout ran native kernels, which keep no contract" in detail for detail in verdict.details)
        page = render_html(run)
        assert "finished, native kernels" in page and "verdict good" not in page
        assert "The first two have to be equal" not in page
        assert "compared with nothing" in page and "The semantic identity has to be" in page
        assert '<span class="some">differs</span>' not in page
    exact = render_html(summary())
    assert "The first two have to be equal on all sides" in exact and "native" not in exact.split("</style>")[1]
    other = {**sides["engine-0"], "semantic": "11" * 32}
    run = summary(identities={**sides, "engine-0": other}, native=("rollout",))
    assert run.identity_differences == ("semantic",)  # that one has to be equal whatever the kernels are


def test_nothing_of_the_evidence_is_shown_as_python_writes_it():
    facts = {
        "certificates": {"of": {f"region_{n}/cpu.gemm": f"{n:02d}" * 32 for n in range(20)}, "made": ["a", "b"]},
        "degrees": {"tp": 1, "dp": 2},
        "first_use": {f"case/{n}": {"differing": 0, "outputs": 512 + n} for n in range(12)},
        "samples": [{"a": 1}, {"b": [1, 2]}],
        "empty": {},
        "tokens_seen": 1234567,
        "kept": True,
        "none": None,
        "<b>": "<i>",
    }
    page = render_html(summary(evidence={"trainer": {"calls": [], "facts": facts, "refused": []}}))
    body = page[page.index("Evidence") :]
    assert "{" not in body and "&#x27;" not in body and "[" not in body
    for text in ("tp 1, dp 2", "1,234,567", "differing 0, outputs 523", "12 entries", "<dt>tokens seen</dt>",
                 f'<code title="{"07" * 32}">{("07" * 32)[:16]}</code>', "<dt>&lt;b&gt;</dt><dd>&lt;i&gt;</dd>",
                 "<dt>kept</dt><dd>yes</dd>", "<dt>empty</dt><dd>none</dd>"):  # fmt: skip
        assert text in body
    assert "<th>implementation</th>" not in body  # an owner that calls nothing has no table of calls
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []


def test_tiles_hold_their_text():
    css = render_html(summary()).split("<style>")[1].split("</style>")[0]
    value = css[css.index(".tile .v") :].split("}")[0]
    assert "nowrap" not in value and "overflow-wrap" in value
    assert "reward, first → last 5 steps" in render_html(summary())
    assert "reward, first → last step<" in render_html(summary(steps=[step(0), step(1)]))
    one = render_html(summary(steps=[step(0)], evaluations=[{"step": 0, "reward_mean": 0.5}]))
    assert "→" not in one and "first" not in one.split('class="tiles"')[1].split("<h2>")[0]


def test_one_of_something_has_no_plural_here_either():
    verdict = summary(
        steps=[
            step(0, compared_tokens=1, mismatch_count=1, distribution_mismatch_count=1, nonfinite_count=1,
                 incomparable_tokens={"kv_version": 1})
        ]
    ).verdict()  # fmt: skip
    assert verdict.headline == "1 token compared, 1 differing"
    assert verdict.details[0] == "1 log-probability and 1 distribution differ, in step 0"
    assert "1 token was not comparable: read keys and values of other weights" in verdict.details
    assert "1 compared log-probability was infinite or NaN" in verdict.details


def test_long_runs_are_cut_in_the_terminal_and_whole_on_the_page():
    run = summary(steps=[step(n) for n in range(200)])
    assert "..." in text_of(run) and len(text_of(run).splitlines()) < 80
    assert render_html(run).count("<tr><td>") >= 200


def test_evaluations_need_their_fields():
    with pytest.raises(InputError, match="reward_mean"):
        summary(evaluations=[{"step": 1}])


def test_numbers_as_people_read_them():
    assert (decimal(None), decimal(float("nan")), decimal(0.0)) == ("–", "–", "0")
    assert (decimal(0.5), decimal(12.345), decimal(1.2e-7)) == ("0.500", "12.3", "1.20e-07")
    assert (seconds(None), seconds(0.25), seconds(95), seconds(7300)) == ("–", "0.25 s", "1 min 35 s", "2 h 01 min")
    assert (size(512), size(3 * 2**30), size(None)) == ("512 B", "3.00 GiB", "–")
    assert ticks(0.0, 1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(2.0, 2.0)[-1] > 2.0 and (tick_label(0), tick_label(4100), tick_label(2.5e6)) == ("0", "4.1k", "2.5M")
