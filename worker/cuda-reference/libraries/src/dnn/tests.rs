//! Rejected calls, and their status codes.

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
    // SAFETY: points to a live handle.
    assert_eq!(unsafe { cudnnBackendCreateDescriptor(kind, &raw mut raw) }, 0);
    raw
}

fn set<T>(of: Pointer, name: i32, kind: i32, values: &[T]) -> i32 {
    // SAFETY: the values outlive the call.
    unsafe { cudnnBackendSetAttribute(of, name, kind, values.len() as i64, values.as_ptr().cast()) }
}

fn finalize(of: Pointer) -> i32 {
    // SAFETY: created here.
    unsafe { cudnnBackendFinalize(of) }
}

/// A tensor descriptor that is not finalized.
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

/// A bf16 filter gradient that is not finalized, whose filters have this type, ID and channel
/// count.
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

/// Number of engines for a filter gradient, or the error.
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
fn attributes_are_typed_counted_and_fixed_once_finalized() {
    let raw = create(TENSOR);
    assert_eq!(set(raw, 906, 23, &[1i32]), ATTRIBUTE_TYPE);
    assert_eq!(set(raw, 902, INT64, &[1i64; 3]), OUT_OF_BOUND);
    assert_eq!(set(raw, 700, FLOAT, &[1f32]), NOT_SUPPORTED);
    assert_eq!(finalize(raw), BAD_PARAM, "no attribute is set");
    let computation = tensor(1, 9, [2, 8, 4, 4]);
    assert_eq!(finalize(computation), 0);
    assert_eq!(set(computation, 906, INT64, &[2i64]), NOT_INITIALIZED, "already finalized");
    assert_eq!(finalize(computation), BAD_PARAM);
    // SAFETY: created here; a destroyed handle is rejected because its tag is gone.
    assert_eq!(unsafe { cudnnBackendDestroyDescriptor(computation) }, 0);
    let mut to = std::ptr::null_mut();
    // SAFETY: points to a live handle.
    assert_eq!(unsafe { cudnnBackendCreateDescriptor(41, &raw mut to) }, NOT_SUPPORTED, "attention");
}

#[test]
fn operations_need_fitting_tensors_with_distinct_ids() {
    assert_eq!(finalize(gradient(9, 2, 8)), 0);
    assert_eq!(finalize(gradient(9, 2, 7)), SHAPE_MISMATCH, "groups, too");
    assert_eq!(finalize(gradient(9, 1, 8)), DUPLICATED_ENTRIES);
}

#[test]
fn no_engine_accumulates_16_bit_factors_into_an_f32_gradient() {
    assert_eq!(engines(9), Ok(1));
    assert_eq!(engines(0), Err(NOT_SUPPORTED));
}
