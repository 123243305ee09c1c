//! Tests tensor layouts, and sizes that are rejected before the library is called.

use super::*;

const SHAPE: Shape = Shape { element: Element::Bf16, batch: 2, context: 5, heads: 3, head_size: 8, causal: true };

#[test]
fn queries_keys_and_values_are_parts_of_the_same_rows() {
    let tensors = Attention { shape: SHAPE, backward: false }.tensors().unwrap();
    let [queries, keys, values, out, saved] = tensors[..5] else { panic!("{tensors:?}") };
    assert_eq!((queries.dimensions, queries.strides), ([2, 3, 5, 8], [360, 8, 72, 1]));
    assert_eq!((keys.dimensions, keys.strides), ([2, 3, 8, 5], [360, 8, 1, 72]), "keys have rows for columns");
    assert_eq!((values.dimensions, values.strides), (queries.dimensions, queries.strides));
    assert_eq!((out.strides, out.bytes()), ([120, 8, 24, 1], 2 * 2 * 5 * 24));
    assert_eq!((saved.dimensions, saved.strides), ([2, 3, 5, 1], [15, 5, 1, 1]));
    let numbers: Vec<Place> = tensors[5..].iter().map(|tensor| tensor.place).collect();
    assert_eq!(numbers, [Place::Host(1.0 / 8f32.sqrt()), Place::Host(f32::NEG_INFINITY)]);
    let full = Attention { shape: Shape { causal: false, ..SHAPE }, backward: false };
    assert_eq!(full.tensors().unwrap().len(), 6, "nothing is masked");
}

#[test]
fn f32_is_rejected() {
    let attention = Attention { shape: Shape { element: Element::F32, ..SHAPE }, backward: true };
    assert!(attention.tensors().unwrap_err().to_string().contains("numbers in 32 bits, expected 16"));
}

#[test]
fn backward_needs_means_and_the_gradients_of_scores() {
    let [forward, backward] = [false, true].map(|backward| Attention { shape: SHAPE, backward });
    assert_eq!(backward.scratch_bytes(), 4 * 2 * 3 * 5);
    assert_eq!([forward, backward].map(|pass| pass.workspace_bytes()), [256, 256 + 2 * 2 * 3 * 64 * 128]);
}
