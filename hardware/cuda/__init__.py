"""sm_90: ``mma`` (tensor cores, bf16 and fp16), ``exp2`` (the instruction ``ex2.approx.ftz.f32``)."""
