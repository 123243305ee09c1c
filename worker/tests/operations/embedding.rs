//! Embeddings and gathered rows, in every format.

use crate::support::{close, cpus, doubles, floats, random, same_bits};
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use switchyard_worker::cpu::{Element, bf16, ops};

const SEGMENTS: usize = 3;

fn embedding_of<E: Element>(width: usize, vocabulary: usize, context: usize, sequences: usize, segmented: bool) {
    let rows = context * sequences;
    let inputs: Vec<u32> = (0..rows).map(|r| (r * r % vocabulary) as u32).collect();
    let numbers: Vec<u8> = (0..rows).map(|r| (r / 3 % SEGMENTS) as u8).collect();
    let (tokens, positions) = (random::<E>(vocabulary * width, 1, 1.0), random::<E>(context * width, 2, 1.0));
    let (table, dx) = (random::<E>(SEGMENTS * width, 3, 1.0), random::<E>(rows * width, 4, 1.0));
    let got = same_bits(|cpu| {
        let mut x = vec![E::of(f32::NAN); rows * width];
        let segments = segmented.then_some((&numbers[..], &table[..]));
        ops::embed(cpu, &inputs, &tokens, &positions, segments, width, &mut x);
        let (mut d_tokens, mut d_positions) = (vec![0.5; vocabulary * width], vec![9.0; context * width]);
        ops::embed_backward(cpu, &inputs, &dx, width, &mut d_tokens);
        ops::position_backward(cpu, &dx, width, &mut d_positions, false);
        let mut d_segments = vec![0.25; SEGMENTS * width];
        let mut partials = vec![7.0; ops::partials_len(rows, SEGMENTS * width)];
        ops::segment_backward(cpu, &numbers, &dx, width, &mut partials, &mut d_segments, true);
        [floats(&x), d_tokens, d_positions, d_segments].concat()
    });
    let (tokens, positions, table, dx) = (doubles(&tokens), doubles(&positions), doubles(&table), doubles(&dx));
    let mut x = vec![0.0; rows * width];
    let (mut d_tokens, mut d_positions) = (vec![0.5; vocabulary * width], vec![0.0; context * width]);
    let mut d_segments = vec![0.25; SEGMENTS * width];
    for r in 0..rows {
        let (token, segment) = (inputs[r] as usize, usize::from(numbers[r]));
        for i in 0..width {
            x[r * width + i] = tokens[token * width + i] + positions[r % context * width + i];
            if segmented {
                x[r * width + i] += table[segment * width + i];
            }
            d_tokens[token * width + i] += dx[r * width + i];
            d_positions[r % context * width + i] += dx[r * width + i];
            d_segments[segment * width + i] += dx[r * width + i];
        }
    }
    close::<E>("x", &got[..x.len()], &x, 1e-6);
    close::<f32>("gradients", &got[x.len()..], &[d_tokens, d_positions, d_segments].concat(), 1e-5);
}

#[test]
fn embeddings_and_their_gradients() {
    // The last size has a vocabulary larger than 16 bits.
    for (width, vocabulary, context, sequences) in [(1, 1, 1, 1), (70, 5, 20, 2), (33, 9, 70, 3), (3, 70_000, 400, 1)] {
        for segmented in [false, true] {
            all_formats!(embedding_of(width, vocabulary, context, sequences, segmented));
        }
    }
}

#[test]
fn an_f32_table_feeds_a_16_bit_format() {
    let (tokens, positions) = ([1.0f32, 2.0, 3.0, 4.0], [0.001f32, 0.5]);
    let mut x = vec![bf16::ZERO; 2];
    ops::embed(&cpus()[0], &[1], &tokens, &positions, None, 2, &mut x);
    assert_eq!(floats(&x), [3.0, 4.5]);
}

fn gather_of<E: Element>(width: usize, rows: usize, picked: &[u32]) {
    let (x, dy) = (random::<E>(rows * width, 1, 1.0), random::<E>(picked.len() * width, 2, 1.0));
    let got = same_bits(|cpu| {
        let (mut y, mut dx) = (vec![E::of(f32::NAN); picked.len() * width], vec![0.5f32; rows * width]);
        ops::gather_rows(cpu, picked, &x, width, &mut y);
        ops::scatter_add_rows(cpu, picked, &dy, width, &mut dx);
        [floats(&y), dx].concat()
    });
    let mut want: Vec<f64> = picked.iter().flat_map(|&r| doubles(&x[r as usize * width..][..width])).collect();
    let mut dx = vec![0.5; rows * width];
    for (k, &r) in picked.iter().enumerate() {
        for i in 0..width {
            dx[r as usize * width + i] += f64::from(dy[k * width + i].get());
        }
    }
    close::<f32>("y", &got[..want.len()], &want, 0.0);
    want.extend(dx);
    close::<f32>("dx", &got, &want, 1e-5);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_are_gathered_and_scattered(
        width in 1usize..150, rows in 1usize..90, picks in prop::collection::vec(0usize..1000, 0..80),
    ) {
        let picked: Vec<u32> = picks.iter().map(|pick| (pick % rows) as u32).collect();
        all_formats!(gather_of(width, rows, &picked));
    }
}

#[test]
fn distinct_rows_are_added_in_a_16_bit_format() {
    let mut dx = vec![bf16::ONE; 6];
    let dy = [0.5f32, 1.5, -2.0, 3.0].map(<bf16 as Element>::of);
    ops::scatter_add_rows(&cpus()[0], &[2, 0], &dy, 2, &mut dx);
    assert_eq!(floats(&dx), [-1.0, 4.0, 1.0, 1.0, 1.5, 2.5]);
}

#[test]
fn an_index_out_of_range_is_refused() {
    for cpu in cpus() {
        let mut y = [0.0f32; 4];
        let refused = |f: &mut dyn FnMut()| assert!(catch_unwind(AssertUnwindSafe(f)).is_err());
        refused(&mut || ops::gather_rows(&cpu, &[0, 2], &[1.0; 4], 2, &mut y));
        refused(&mut || ops::scatter_add_rows(&cpu, &[0, 2], &[1.0f32; 4], 2, &mut y));
        refused(&mut || ops::embed(&cpu, &[0, 2], &[1.0f32; 4], &[1.0; 2], None, 2, &mut y));
        let mut d = [0.0f32; 2];
        refused(&mut || ops::segment_backward(&cpu, &[0, 1], &[1.0f32; 4], 2, &mut [0.0; 2], &mut d, false));
    }
}
