//! What the calls refuse, with the status of each.

use super::attributes::{CHAR, DESCRIPTOR, DEVICE, FILTERS, GRAPH, HEURISTIC, INT64, TENSOR, WINDOW};
use super::descriptors::{cudnnBackendCreateDescriptor, cudnnBackendDestroyDescriptor};
use super::descriptors::{cudnnBackendFinalize, cudnnBackendGetAttribute, cudnnBackendSetAttribute};
use super::*;

const DATA_TYPE: i32 = 1;
const FLOAT: i32 = 4;
const MODE: i32 = 7;
const HEUR_MODE: i32 = 8;

fn create(kind: i32) -> Pointer {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the pointer is to a live handle.
    assert_eq!(unsafe { cudnnBackendCreateDescriptor(kind, &raw mut raw) }, 0);
    raw
}

fn set<T>(of: Pointer, name: i32, kind: i32, values: &[T]) -> i32 {
    // SAFETY: the values live.
    unsafe { cudnnBackendSetAttribute(of, name, kind, values.len() as i64, values.as_ptr().cast()) }
}

fn finalize(of: Pointer) -> i32 {
    // SAFETY: it was made here.
    unsafe { cudnnBackendFinalize(of) }
}

/// A tensor that is not finalized.
fn tensor(id: i64, data_type: i32, dimensions: [i64; 4]) -> Pointer {
    let [_, c, h, w] = dimensions;
    let raw = create(TENSOR);
    assert_eq!(set(raw, 906, INT64, &[id]), 0);
    assert_eq!(set(raw, 901, DATA_TYPE, &[data_type]), 0);
    assert_eq!(set(raw, 900, INT64, &[16i64]), 0);
    assert_eq!(set(raw, 902, INT64, &dimensions), 0);
    assert_eq!(set(raw, 903, INT64, &[c * h * w, 1, w * c, c]), 0);
    raw
}

/// A gradient of filters, of images in bf16, that is not finalized: its filters have this type, number and channels.
fn gradient(data_type: i32, id: i64, channels: i64) -> Pointer {
    let window = create(WINDOW);
    assert_eq!(set(window, 100, DATA_TYPE, &[0i32]) + set(window, 101, MODE, &[1i32]), 0);
    assert!([102, 103, 104, 105].iter().all(|name| set(window, *name, INT64, &[1i64; 2]) == 0));
    assert_eq!(set(window, 106, INT64, &[2i64]) + finalize(window), 0);
    let tensors = [tensor(1, 9, [2, 8, 4, 4]), tensor(id, data_type, [8, channels, 3, 3]), tensor(3, 9, [2, 8, 4, 4])];
    let raw = create(FILTERS);
    assert_eq!(set(raw, 712, FLOAT, &[1f32]) + set(raw, 713, FLOAT, &[0f32]) + set(raw, 714, DESCRIPTOR, &[window]), 0);
    for (name, tensor) in [716, 715, 717].into_iter().zip(tensors) {
        assert_eq!(set(raw, name, DESCRIPTOR, &[tensor]), NOT_FINALIZED);
        assert_eq!(finalize(tensor) + set(raw, name, DESCRIPTOR, &[tensor]), 0);
    }
    raw
}

/// How many engines there are for a gradient of filters, or why there is none.
fn engines(data_type: i32) -> Result<i64, i32> {
    let (operation, graph, device, heuristic) =
        (gradient(data_type, 2, 8), create(GRAPH), create(DEVICE), create(HEURISTIC));
    assert_eq!(finalize(operation) + set(graph, 801, DESCRIPTOR, &[operation]) + finalize(graph), 0);
    assert_eq!(set(device, 2702, CHAR, br#"{"deviceVer":900}"#) + finalize(device), 0);
    assert_eq!(set(heuristic, 201, DESCRIPTOR, &[graph]) + set(heuristic, 200, HEUR_MODE, &[3i32]), 0);
    assert_eq!(set(heuristic, 204, DESCRIPTOR, &[device]), 0);
    match finalize(heuristic) {
        0 => {
            let (list, mut count) = ([create(super::attributes::CONFIGURATION); 1], 0);
            let to = list.as_ptr().cast_mut().cast();
            // SAFETY: the list has one live descriptor.
            assert_eq!(unsafe { cudnnBackendGetAttribute(heuristic, 202, DESCRIPTOR, 1, &raw mut count, to) }, 0);
            Ok(count)
        }
        status => Err(status),
    }
}

#[test]
fn attributes_have_types_counts_and_an_end() {
    let raw = create(TENSOR);
    assert_eq!(set(raw, 906, 23, &[1i32]), ATTRIBUTE_TYPE);
    assert_eq!(set(raw, 902, INT64, &[1i64; 3]), OUT_OF_BOUND);
    assert_eq!(set(raw, 700, FLOAT, &[1f32]), NOT_SUPPORTED);
    assert_eq!(finalize(raw), BAD_PARAM, "nothing is set");
    let whole = tensor(1, 9, [2, 8, 4, 4]);
    assert_eq!(finalize(whole), 0);
    assert_eq!(set(whole, 906, INT64, &[2i64]), NOT_INITIALIZED, "it is finalized");
    assert_eq!(finalize(whole), BAD_PARAM);
    // SAFETY: it was made here; a handle that was destroyed is not found again, as its tag is gone.
    assert_eq!(unsafe { cudnnBackendDestroyDescriptor(whole) }, 0);
    let mut to = std::ptr::null_mut();
    // SAFETY: the pointer is to a live handle.
    assert_eq!(unsafe { cudnnBackendCreateDescriptor(41, &raw mut to) }, NOT_SUPPORTED, "attention");
}

#[test]
fn an_operation_has_tensors_that_fit_each_by_its_own_number() {
    assert_eq!(finalize(gradient(9, 2, 8)), 0);
    assert_eq!(finalize(gradient(9, 2, 7)), SHAPE_MISMATCH, "groups, too");
    assert_eq!(finalize(gradient(9, 1, 8)), DUPLICATED_ENTRIES);
}

#[test]
fn no_engine_sums_16_bits_into_a_gradient_of_32() {
    assert_eq!(engines(9), Ok(1));
    assert_eq!(engines(0), Err(NOT_SUPPORTED));
}
