use super::*;

fn kernel(body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry k(\n.param .u64 k_param_0\n)\n{{\n{body}\n}}\n"
    )
}

fn refusal(body: &str) -> String {
    Module::parse(&kernel(body)).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn an_unknown_instruction_is_an_error_with_its_line() {
    let text = refusal(".reg .b32 %r<4>;\nadd.s32 %r1, %r2, 1;\ndp4a.s32.s32 %r1, %r2, %r2, %r3;\nret;");
    assert_eq!(text, "line 10 of the PTX: `dp4a.s32.s32 %r1, %r2, %r2, %r3`, which is an unsupported instruction");
}

#[test]
fn an_unknown_modifier_is_not_ignored() {
    assert!(refusal(".reg .f32 %f<4>;\nadd.sat.f32 %f1, %f2, %f3;").contains("`add.sat.f32 %f1, %f2, %f3`"));
    assert!(refusal(".reg .f32 %f<4>;\nadd.rz.f32 %f1, %f2, %f3;").contains("`add.rz.f32"));
    assert!(refusal(".reg .b32 %r<4>;\n.reg .b64 %d<2>;\nst.global.u8 [%d1], %r1;").contains("`st.global.u8 "));
    assert!(refusal("bar.sync 1;").contains("`bar.sync 1`"));
    assert!(refusal("bar.sync 0, 64;").contains("`bar.sync 0, 64`"));
    assert!(refusal(".reg .b32 %r<4>;\n.reg .b64 %d<2>;\nld.local.u32 %r1, [%d1];").contains("`ld.local.u32 "));
}

#[test]
fn undeclared_names_are_errors() {
    assert!(refusal(".reg .b32 %r<4>;\nmov.u32 %r4, 1;").contains("`%r4`, expected a declared register"));
    assert!(refusal("bra $L__BB0_1;").contains("`$L__BB0_1`, expected a label"));
    assert!(refusal(".reg .b32 %r<4>;\nmov.u32 %r1, TABLE;").contains("`TABLE`, expected a register, a number or a"));
    assert!(refusal(".local .align 4 .b8 depot[64];").contains("`.local`, expected a directive that is known"));
}

#[test]
fn text_that_is_not_ptx_is_an_error() {
    for text in ["", ".visible .entry", ".visible .entry k(", "/* x", "\u{e9}", ".reg ;", "@", "add", "{ {", ".loc"] {
        let parsed = Module::parse(&format!("{text}\n"));
        assert!(parsed.is_err() || parsed.is_ok_and(|module| module.kernels().count() == 0), "{text}");
        let _ = Module::parse(&kernel(text));
    }
}

#[test]
fn instructions_match_the_manual() {
    let compute = |opcode: &str, a: u64, b: u64, c: u64| (arithmetic::function(opcode).unwrap().lane)(a, b, c);
    let float = |value: f32| u64::from(value.to_bits());
    assert_eq!(compute("add.s32", 0xffff_ffff, 2, 0), 1);
    assert_eq!(compute("mul.wide.s32", 0xffff_ffff, 2, 0), (-2i64) as u64);
    assert_eq!(compute("shr.s32", 0x8000_0000, 40, 0), 0xffff_ffff);
    assert_eq!(compute("shl.b32", 1, 32, 0), 0);
    assert_eq!(compute("prmt.b32", 0x3322_1100, 0x7766_5544, 0x5410), 0x5544_1100);
    assert_eq!(compute("prmt.b32", 0x0000_0080, 0, 0x8888), 0xffff_ffff);
    assert_eq!(compute("shf.l.wrap.b32", 0x8000_0001, 0x1, 1), 3);
    assert_eq!(compute("bfe.u32", 0xabcd_ef01, 8, 8), 0xef);
    assert_eq!(compute("setp.ne.f32", float(f32::NAN), float(1.0), 0), 0);
    assert_eq!(compute("setp.neu.f32", float(f32::NAN), float(1.0), 0), 1);
    assert_eq!(compute("setp.leu.f32", float(f32::NAN), float(1.0), 0), 1);
    assert_eq!(compute("min.f32", float(f32::NAN), float(1.0), 0), float(1.0));
    assert_eq!(compute("cvt.rzi.s32.f32", float(-1.9), 0, 0), 0xffff_ffff);
    assert_eq!(compute("cvt.s64.s32", 0xffff_ffff, 0, 0), u64::MAX);
    assert_eq!(compute("cvt.u64.u32", 0xffff_ffff, 0, 0), 0xffff_ffff);
    // The first operand goes to the high half.
    assert_eq!(compute("cvt.rn.bf16x2.f32", float(2.0), float(1.0), 0), 0x4000_3f80);
    // Ties round to even.
    assert_eq!(compute("cvt.rn.satfinite.e4m3x2.f32", float(1.0), float(-1e9), 0), 0x38fe);
    assert_eq!(compute("cvt.rn.satfinite.e5m2x2.f32", float(1.0), float(-1e9), 0), 0x3cfb);
    assert_eq!(compute("cvt.rn.bf16.f32", 0x3f80_8000, 0, 0), 0x3f80);
    assert_eq!(compute("cvt.rn.bf16.f32", 0x3f81_8000, 0, 0), 0x3f82);
}

#[test]
fn bits_are_inserted_at_their_position() {
    let insert = arithmetic::insert;
    assert_eq!(insert(0xabcd, 0xffff_ffff, 4 | 8 << 8), 0xffff_fcdf);
    assert_eq!(insert(7, 0x1f, 5 | 27 << 8), 0xff);
    assert_eq!(insert(1, 9, 31), 9);
    assert_eq!(insert(0x1_2345_6789, 0, 32 << 8), 0x2345_6789);
    // The position must be an immediate.
    assert!(refusal(".reg .b32 %r<4>;\nbfi.b32 %r1, %r2, %r3, %r2, 4;").contains("`bfi.b32 %r1, %r2"));
}
