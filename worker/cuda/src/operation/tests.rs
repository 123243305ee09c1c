//! Checks constants against NVIDIA's header, and which engines are acceptable.

use super::*;
use crate::convolution::tests::GOOD;
use crate::cublaslt::Arithmetic;
use crate::header::assert_library_header;
use crate::kernels::Element;
use crate::kernels::attention::Shape;

#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn constants_match_the_header() {
    let numbers = [
        ("CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR", DEVICEPROP_DESCRIPTOR),
        ("CUDNN_ATTR_ENGINEHEUR_DEVICEPROP", ENGINEHEUR_DEVICEPROP),
        ("CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP", EXECUTION_PLAN_DEVICEPROP),
        ("CUDNN_ATTR_DEVICEPROP_DEVICE_ID", DEVICEPROP_DEVICE_ID),
        ("CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION", DEVICEPROP_JSON),
        ("CUDNN_NUMERICAL_NOTE_TENSOR_CORE", TENSOR_CORE),
        ("CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS", DOWN_CONVERT_INPUTS),
        ("CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION", REDUCED_PRECISION_REDUCTION),
        ("CUDNN_NUMERICAL_NOTE_FFT", FFT),
        ("CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC", NONDETERMINISTIC),
        ("CUDNN_NUMERICAL_NOTE_WINOGRAD", WINOGRAD[0]),
        ("CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4", WINOGRAD[1]),
        ("CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6", WINOGRAD[2]),
        ("CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13", WINOGRAD[3]),
    ];
    assert_library_header("cudnn.h", numbers, &[]);
}

#[test]
fn nondeterministic_or_inexact_engines_are_rejected() {
    let exact = Convolution { element: Element::F32, ..GOOD };
    let rounded = Convolution { arithmetic: Arithmetic::Tf32, ..exact };
    let [half, exact, rounded] = [GOOD, exact, rounded].map(Operation::Convolution);
    let shape = Shape { element: Element::Bf16, batch: 1, context: 8, heads: 1, head_size: 8, causal: true };
    let attention = Operation::Attention(Attention { shape, backward: true });
    for (operation, notes, [may, may_unordered]) in [
        (half, &[][..], [true; 2]),
        (half, &[TENSOR_CORE], [true; 2]),
        (half, &[TENSOR_CORE, NONDETERMINISTIC], [false, true]),
        (half, &[REDUCED_PRECISION_REDUCTION], [false; 2]),
        (half, &[WINOGRAD[0]], [false; 2]),
        (exact, &[], [true; 2]),
        (exact, &[TENSOR_CORE], [false; 2]),
        (exact, &[DOWN_CONVERT_INPUTS], [false; 2]),
        (rounded, &[TENSOR_CORE], [true; 2]),
        (rounded, &[FFT], [false; 2]),
        (attention, &[TENSOR_CORE], [true; 2]),
        (attention, &[TENSOR_CORE, NONDETERMINISTIC], [false, true]),
    ] {
        let got = [true, false].map(|deterministic| operation.accepts(notes, deterministic));
        assert_eq!(got, [may, may_unordered], "{operation:?} with {notes:?}");
    }
}
