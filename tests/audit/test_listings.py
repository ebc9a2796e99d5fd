"""Listings: operands, guards, modifiers, labels and source lines of PTX, SASS and amdgcn."""

from __future__ import annotations

from hardware.cuda.listing import parse_ptx, parse_sass
from hardware.listing import split_operands
from hardware.rocm.listing import parse_amdgcn

PTX = """
.version 9.4
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .f32 k_param_1
)
.reqntid 128
{
	.reg .b32 	%r<5>;
	.loc	1 7 3
	ld.param.b32 	%r1, [k_param_1];
$L__BB0_1:
	.loc	1 9 5, function_name $L__info_string0, inlined_at 1 7 3 // k.py:9:5
	@%p1 st.global.v4.b32 [ %rd1 + 16 ], { %r1, %r2, %r3, %r4 };
	{
	.reg .pred p;
	mov.b32 	{%rs1, %rs2}, %r1;
	}
	.loc	1 0 5
	@!%p2 bra 	$L__BB0_1;
	ret;
}
	.file	1 "/src" "k.py"
"""
SASS = """
	.section	.text.k,"ax",@progbits
        .global         k
.text.k:
	//## File "/src/k.py", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P4 LDG.E R5, desc[UR6][R24.64+0x200] ;
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*0020*/                   FFMA.RZ R0, R3, R1, R2 ;
"""
AMDGCN = """
	.globl	k
	.text
k:
	.file	1 "/src" "k.py"
	.loc	1 7 3 is_stmt 1 ; k.py:7:3
	v_pk_fma_f32 v[2:3], v[2:3], v[4:5], 0 op_sel_hi:[1,1,0]
	.loc	1 0 0
	global_load_dwordx4 v[2:5], v[2:3], off offset:16
.LBB0_1:                                ; loop
	ds_read2st64_b64 v[0:3], v4 offset0:1 offset1:9
	s_cbranch_scc1 .LBB0_1
	.amdhsa_float_denorm_mode_32 3
	.section	.rodata
	.byte 1
"""


def test_operands_keep_brackets_together() -> None:
    assert split_operands("{%r1, %r2}, [ %rd1 + 0 ], v[0:3], f(a, b)") == (
        "{%r1, %r2}",
        "[ %rd1 + 0 ]",
        "v[0:3]",
        "f(a, b)",
    )


def test_ptx() -> None:
    listing = parse_ptx(PTX)
    assert listing.name == "k" and listing.directives["target"] == "sm_90a"
    assert listing.directives["param:k_param_1"] == "f32" and listing.directives["shared"] == "global_smem"
    assert [i.opcode for i in listing.instructions] == ["ld.param.b32", "st.global.v4.b32", "mov.b32", "bra", "ret"]
    load, store, move, branch, _ = listing.instructions
    assert str(load.location) == "/src/k.py:7" and str(store.location) == "/src/k.py:9"
    assert store.guard == "%p1" and store.operands == ("[ %rd1 + 16 ]", "{ %r1, %r2, %r3, %r4 }")
    assert move.operands == ("{%rs1, %rs2}", "%r1")
    assert branch.guard == "!%p2" and branch.location.line == 0 and branch.place.line == 9
    assert listing.labels["$L__BB0_1"] == 1


def test_sass() -> None:
    listing = parse_sass(SASS)
    assert listing.name == "k" and [i.opcode for i in listing.instructions] == ["LDC", "LDG.E", "FFMA.RZ"]
    assert listing.instructions[1].guard == "!P4" and listing.instructions[1].location.line == 7
    assert listing.instructions[2].location.file.startswith("$__internal_0")
    assert listing.labels[".L_x_0"] == 1


def test_amdgcn() -> None:
    listing = parse_amdgcn(AMDGCN)
    fused, load, read, branch = listing.instructions
    assert fused.operands == ("v[2:3]", "v[2:3]", "v[4:5]", "0") and fused.modifiers == {"op_sel_hi": "[1,1,0]"}
    assert load.operands == ("v[2:5]", "v[2:3]", "off") and load.modifiers == {"offset": "16"}
    assert load.location.line == 0 and str(load.place) == "/src/k.py:7"
    assert read.operands == ("v[0:3]", "v4") and read.modifiers == {"offset0": "1", "offset1": "9"}
    assert branch.operands == (".LBB0_1",) and listing.labels[".LBB0_1"] == 2
    assert listing.directives["amdhsa_float_denorm_mode_32"] == "3"
