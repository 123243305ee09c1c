//! Checks constants against NVIDIA's header, and sizes that are rejected before the library is
//! called.

use super::*;
use crate::header::assert_library_header;

/// Uses bf16.
pub(crate) const GOOD: Convolution = Convolution {
    direction: Direction::Forward,
    element: Element::Bf16,
    adds: false,
    arithmetic: Arithmetic::Ieee,
    images: 2,
    height: 9,
    width: 7,
    channels: 3,
    pitch: 8,
    filters: 5,
    result_pitch: 8,
    window: 3,
    stride: 2,
    padding: 1,
};

#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn constants_match_the_header() {
    let convolution = |name: &str| format!("CUDNN_ATTR_CONVOLUTION_{name}");
    let mut numbers: Vec<(String, i32)> = [
        ("COMP_TYPE", COMP_TYPE),
        ("CONV_MODE", CONV_MODE),
        ("DILATIONS", DILATIONS),
        ("FILTER_STRIDES", FILTER_STRIDES),
        ("POST_PADDINGS", POST_PADDINGS),
        ("PRE_PADDINGS", PRE_PADDINGS),
        ("SPATIAL_DIMS", SPATIAL_DIMS),
    ]
    .map(|(name, value)| (convolution(name), value))
    .to_vec();
    let others = [
        ("CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR", CONVOLUTION_DESCRIPTOR),
        ("CUDNN_CROSS_CORRELATION", CROSS_CORRELATION),
    ];
    numbers.extend(others.map(|(name, value)| (name.to_owned(), value)));
    for direction in [Direction::Forward, Direction::Images, Direction::Filters] {
        let (name, images, results) = match direction {
            Direction::Forward => ("FORWARD", "X", "Y"),
            Direction::Images => ("BWD_DATA", "DX", "DY"),
            Direction::Filters => ("BWD_FILTER", "X", "DY"),
        };
        let filters = if direction == Direction::Filters { "DW" } else { "W" };
        let kind = name.replace("BWD", "BACKWARD");
        let (operation, first, tensors) = direction.numbers();
        numbers.push((format!("CUDNN_BACKEND_OPERATION_CONVOLUTION_{kind}_DESCRIPTOR"), operation));
        let names = ["ALPHA", "BETA", "CONV_DESC", images, filters, results];
        let values = [first, first + 1, first + 2, tensors[0], tensors[1], tensors[2]];
        let named = names.iter().map(|attribute| format!("CUDNN_ATTR_OPERATION_CONVOLUTION_{name}_{attribute}"));
        numbers.extend(named.zip(values));
    }
    assert_library_header("cudnn.h", numbers, &[]);
}

#[test]
fn invalid_sizes_are_rejected() {
    assert_eq!(GOOD.result(), Some([5, 4]));
    assert!(GOOD.tensors().is_ok());
    let wrong = [
        Convolution { window: 12, ..GOOD },
        Convolution { stride: 0, ..GOOD },
        Convolution { images: 0, ..GOOD },
        Convolution { pitch: 2, ..GOOD },
        Convolution { result_pitch: 4, ..GOOD },
    ];
    for one in wrong {
        assert!(one.tensors().is_err(), "{one:?}");
    }
}
