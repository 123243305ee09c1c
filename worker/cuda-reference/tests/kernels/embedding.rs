use super::{
    Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, numbers, rows, run,
    values,
};
use half::{bf16, f16};
use switchyard_cuda::kernels::embedding::{Backward, Embedding, Lookup, order};
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

const VOCABULARY: u32 = 50;
const SEGMENTS: u32 = 2;

/// Many rows of one token, whose runs cross several chunks of 32, some of other tokens, and one out
/// of range.
fn tokens(count: usize) -> Vec<u32> {
    let token = |row: usize| match row % 5 {
        0 | 3 => 7,
        1 => (row * 13 % 50) as u32,
        2 => 49,
        _ => (row * 7 % 11) as u32,
    };
    (0..count).map(|row| if row == 4 { VOCABULARY } else { token(row) }).collect()
}

fn segments(count: usize) -> Vec<u32> {
    (0..count).map(|row| u32::from(row % 9 > 3)).collect()
}

fn table<T: Number>(seed: u64, entries: u32, width: u32) -> Vec<T> {
    numbers(seed, (entries * width) as usize, 1.0).into_iter().map(T::of).collect()
}

/// Forward, compared with the CPU bit for bit.
fn check_forward<T: Number>(rows: Rows, count: usize, context: u32, has_segments: bool) -> Counts {
    let width = rows.width;
    let embedding = Embedding::new(rows, count as u32, context).unwrap();
    let module = compile(&embedding.program());
    let (tokens, segments) = (tokens(count), segments(count));
    let tables = [table::<T>(1, VOCABULARY, width), table(2, context, width), table(3, SEGMENTS, width)];
    let mut counts = Counts::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let lookup = Lookup {
            numbers: device.upload("tokens", &tokens),
            table: device.upload("token table", &tables[0]),
            entries: VOCABULARY,
        };
        let positions = device.upload("positions", &tables[1]);
        let by_segment = has_segments.then(|| Lookup {
            numbers: device.upload("segments", &segments),
            table: device.upload("segment table", &tables[2]),
            entries: SEGMENTS,
        });
        let x = device.allocate("x", count * rows.pitch as usize * size_of::<T>());
        counts = run(&mut device, &module, &embedding.forward(3, lookup, positions, by_segment, x).unwrap(), seed);
        for (row, got) in values::<T>(rows, &device.download(x)).into_iter().enumerate() {
            let of = |table: usize, entry: u32, column: usize| {
                tables[table].get(entry as usize * width as usize + column).map_or(f32::NAN, |x| x.get() as f32)
            };
            for (column, got) in got.into_iter().enumerate() {
                let sum = of(0, tokens[row], column) + of(1, row as u32 % context, column);
                let sum = if has_segments { sum + of(2, segments[row], column) } else { sum };
                let wanted = T::of(sum).get();
                assert!(
                    got == wanted || (tokens[row] == VOCABULARY && got.is_nan()),
                    "{row}, {column}: {got} {wanted}"
                );
            }
        }
    }
    counts
}

/// The rows of a batch in the order in which the host sorts them.
fn rows_in_order(ids: &[u32], entries: u32) -> Vec<u32> {
    let mut rows = vec![0; ids.len()];
    order(ids.iter().copied(), entries, &mut Vec::new(), &mut rows);
    rows
}

#[test]
fn rows_are_sorted_stably_by_token() {
    assert_eq!(rows_in_order(&[3, 0, 9, 3, 1, 7, 0], 4), [1, 6, 4, 0, 3, 2, 5]);
}

/// Gradients of a table on one and more blocks, and of the positions.
fn run_case<T: Number>(
    module: &Module,
    embedding: Embedding,
    rows: Rows,
    (ids, entries, context): (&[u32], u32, u32),
    (most, add): (u32, bool),
    seed: u64,
) -> ([Vec<f32>; 2], [Counts; 3]) {
    let mut device = Device::default();
    let dx = device.upload("dx", &matrix::<T>(rows, ids.len(), |index| number(4, index)));
    let gradient = device.upload("gradient", &vec![1.0f32; (entries * rows.width) as usize]);
    let of_positions = (context * rows.width) as usize;
    let positions = if add {
        device.upload("positions", &vec![1.0f32; of_positions])
    } else {
        device.allocate("positions", 4 * of_positions)
    };
    let on = Backward {
        numbers: device.upload("numbers", ids),
        order: device.upload("order", &rows_in_order(ids, entries)),
        dx,
        partial: device.allocate("partial", embedding.partial_bytes()),
        gradient,
        entries,
    };
    let [first, second] = embedding.backward(most, on).unwrap();
    let third = embedding.positions(most, dx, positions, add).unwrap();
    let counts = [first, second, third].map(|call| run(&mut device, module, &call, seed));
    ([device.download(gradient), device.download(positions)], counts)
}

fn check_backward<T: Number>(width: u32, ids: &[u32], entries: u32, context: u32) {
    let (rows, count) = (rows::<T>(width), ids.len());
    let embedding = Embedding::new(rows, count as u32, context).unwrap();
    let module = compile(&embedding.program());
    let dx = values::<T>(rows, &matrix::<T>(rows, count, |index| number(4, index)));
    let mut wanted = [vec![1.0; (entries * width) as usize], vec![0.0; (context * width) as usize]];
    for (row, dx) in dx.iter().enumerate() {
        for (column, dx) in dx.iter().enumerate() {
            if let Some(sum) = wanted[0].get_mut(ids[row] as usize * width as usize + column) {
                *sum += dx;
            }
            wanted[1][row % context as usize * width as usize + column] += dx;
        }
    }
    let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    let played = |on, seed| run_case::<T>(&module, embedding, rows, (ids, entries, context), on, seed).0;
    let first = played((1, false), 0);
    for seed in 0..super::SEEDS {
        let got = played((5, false), seed);
        for (got, wanted) in got.iter().zip(&wanted) {
            assert_close(&format!("{} {count} x {width}", T::NAME), &wide(got), wanted, 1e-6, 1e-7 * count as f64);
        }
        // Neither the order of blocks and warps nor their number may change any bit.
        assert_eq!(got, first);
    }
    let added: Vec<f64> = wanted[1].iter().map(|sum| sum + 1.0).collect();
    assert_close("added", &wide(&played((5, true), 0)[1]), &added, 1e-6, 1e-7 * count as f64);
}

#[test]
fn sums_match_the_cpu_bit_for_bit() {
    check_forward::<f32>(rows::<f32>(36), 23, 10, true);
    check_forward::<bf16>(Rows { pitch: 48, ..rows::<bf16>(40) }, 23, 23, false);
    check_forward::<f16>(rows::<f16>(768), 9, 4, true);
}

#[test]
fn gradients_of_repeated_rows_are_exact() {
    // One row; runs that end with a chunk; long runs; one run over all rows.
    check_backward::<f32>(36, &tokens(1), VOCABULARY, 1);
    check_backward::<f32>(4, &[[3; 32], [5; 32]].concat(), 6, 8);
    check_backward::<bf16>(136, &tokens(300), VOCABULARY, 60);
    check_backward::<f16>(264, &tokens(97), VOCABULARY, 50);
    check_backward::<f32>(8, &[0; 2400], 1, 100);
    check_backward::<bf16>(768, &segments(130), SEGMENTS, 65);
}

#[test]
fn rows_are_moved_once() {
    let mut table = String::new();
    for count in [128, 320] {
        table += &costs::<f32>(768, count);
        table += &costs::<bf16>(768, count);
    }
    insta::assert_snapshot!("embedding", table);
}

fn costs<T: Number>(width: u32, count: usize) -> String {
    let rows = rows::<T>(width);
    let embedding = Embedding::new(rows, count as u32, 64).unwrap();
    let module = compile(&embedding.program());
    let forward = check_forward::<T>(rows, count, 64, false);
    let ids = tokens(count);
    let (_, [gradient, runs, positions]) =
        run_case::<T>(&module, embedding, rows, (&ids, VOCABULARY, 64), (4, false), 0);
    let all = count * width as usize * size_of::<T>();
    let mut entries = ids.clone();
    entries.sort_unstable();
    entries.dedup();
    let touched = entries.len() * width as usize * 4;
    let of_positions = 64 * width as usize * 4;
    let floors: [&[(&str, [usize; 2])]; 4] = [
        &[("token table", [all, 0]), ("positions", [all, 0]), ("x", [0, all])],
        &[("dx", [all, 0]), ("gradient", [touched, touched])],
        &[("gradient", [touched, touched])],
        &[("dx", [all, 0]), ("positions", [0, of_positions])],
    ];
    let names = ["forward", "gradient", "runs", "positions"];
    let lines =
        [forward, gradient, runs, positions].into_iter().zip(floors).zip(names).map(|((counts, floors), name)| {
            let what = format!("embedding {name}, {} {count} x {width}", T::NAME);
            assert_minimal_traffic(&what, &counts, floors);
            line(&what, &counts)
        });
    lines.collect()
}

#[test]
fn unsupported_shapes_are_refused() {
    let refused = |width, count| {
        Embedding::new(Rows { element: Element::Bf16, width, pitch: 104 }, count, 4).unwrap_err().to_string()
    };
    let text = "embedding: 1 rows of width 100, 4 positions, expected a multiple of 8 and at most 2^31 numbers";
    assert_eq!(refused(100, 1), text);
    assert!(refused(104, 0).starts_with("embedding: 0 rows"));
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 31), device.allocate("large", 4096));
    let embedding = Embedding::new(Rows { element: Element::F32, width: 4, pitch: 4 }, 2, 2).unwrap();
    let on = Backward { numbers: large, order: large, dx: large, partial: small, gradient: large, entries: 1 };
    let text = embedding.backward(1, on).unwrap_err().to_string();
    assert_eq!(text, "embedding_gradient: partial of 31 bytes, expected at least 32");
}
