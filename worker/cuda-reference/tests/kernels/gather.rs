use super::{Device, Number, assert_minimal_traffic, compile, line, matrix, number, rows, run, values};
use half::{bf16, f16};
use switchyard_cuda::kernels::gather::Gather;
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

/// Distinct rows in no particular order, one of which is out of range.
fn numbers(count: usize, of: usize) -> Vec<u32> {
    (0..count).map(|row| if row == 2 { of as u32 } else { (of - 1 - 2 * row) as u32 }).collect()
}

/// Forward and backward, compared with the CPU bit for bit.
fn check<T: Number>(width: u32, count: usize) -> [Counts; 2] {
    let (rows, of) = (rows::<T>(width), 2 * count + 1);
    let gather = Gather::new(rows, count as u32, of as u32).unwrap();
    let module = compile(&gather.program());
    let ids = numbers(count, of);
    let [all, old, some] =
        [(1, of), (2, of), (3, count)].map(|(seed, count)| matrix::<T>(rows, count, |at| number(seed, at)));
    let [x, sums, dy] = [&all, &old, &some].map(|matrix| values::<T>(rows, matrix));
    let mut counts = Default::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let ids_at = device.upload("numbers", &ids);
        let (x_at, y_at) = (device.upload("x", &all), device.allocate("y", size_of_val(some.as_slice())));
        let (dx_at, dy_at) = (device.upload("dx", &old), device.upload("dy", &some));
        let forward = gather.forward(3, ids_at, x_at, y_at).unwrap();
        let backward = gather.backward(3, ids_at, dy_at, dx_at).unwrap();
        counts = [forward, backward].map(|call| run(&mut device, &module, &call, seed));
        for (got, &from) in values::<T>(rows, &device.download(y_at)).iter().zip(&ids) {
            assert!(x.get(from as usize).map_or(got.iter().all(|x| x.is_nan()), |x| x == got), "row {from}");
        }
        let mut wanted = sums.clone();
        for (dy, &to) in dy.iter().zip(&ids).filter(|(_, to)| (**to as usize) < of) {
            wanted[to as usize].iter_mut().zip(dy).for_each(|(sum, dy)| *sum = T::of((*sum + dy) as f32).get());
        }
        assert_eq!(values::<T>(rows, &device.download(dx_at)), wanted);
    }
    counts
}

#[test]
fn scattering_adds_each_row_at_its_index() {
    let rows = rows::<bf16>(21);
    let gather = Gather::new(rows, 5, 5).unwrap();
    let module = compile(&gather.program());
    let [old, dy] = [2, 3].map(|seed| matrix::<bf16>(rows, 5, |at| number(seed, at)));
    let mut device = Device::default();
    let (dx_at, dy_at) = (device.upload("dx", &old), device.upload("dy", &dy));
    run(&mut device, &module, &gather.add(2, dy_at, dx_at).unwrap(), 0);
    let both = values::<bf16>(rows, &old).concat().into_iter().zip(values::<bf16>(rows, &dy).concat());
    let wanted: Vec<f64> = both.map(|(old, dy)| bf16::of((old + dy) as f32).get()).collect();
    assert_eq!(values::<bf16>(rows, &device.download(dx_at)).concat(), wanted);
}

#[test]
fn rows_match_the_cpu_bit_for_bit() {
    check::<f32>(33, 5);
    check::<bf16>(100, 7);
    check::<f16>(1, 3);
    check::<f16>(768, 9);
}

#[test]
fn gathered_rows_are_moved_once() {
    let mut table = String::new();
    for counts in [("f32", 4, check::<f32>(768, 24)), ("bf16", 2, check::<bf16>(768, 24))] {
        // One of the rows is out of range.
        let (name, size, [forward, backward]) = counts;
        let (there, all) = (23 * 768 * size, 24 * 768 * size);
        let floors: [&[(&str, [usize; 2])]; 2] =
            [&[("x", [there, 0]), ("y", [0, all])], &[("dy", [there, 0]), ("dx", [there, there])]];
        for ((counts, floors), kernel) in [forward, backward].iter().zip(floors).zip(["gather", "scatter"]) {
            let what = format!("{kernel}, {name} 24 x 768");
            assert_minimal_traffic(&what, counts, floors);
            table += &line(&what, counts);
        }
    }
    insta::assert_snapshot!("gather", table);
}

#[test]
fn a_duplicate_row_is_reported_as_a_race() {
    let gather = Gather::new(rows::<f32>(4), 2, 3).unwrap();
    let module = compile(&gather.program());
    let mut device = Device::default();
    let [numbers, dy, dx] =
        [device.upload("numbers", &[1u32, 1]), device.upload("dy", &[1.0f32; 8]), device.upload("dx", &[0.0f32; 12])];
    let call = gather.backward(1, numbers, dy, dx).unwrap();
    let text = device.launch(&module, &super::Launch::new(&call, 0)).unwrap_err().to_string();
    assert!(text.contains("`dx`"), "{text}");
}

#[test]
fn unsupported_shapes_are_refused() {
    let narrow = Rows { element: Element::F32, width: 4, pitch: 4 };
    let text = Gather::new(narrow, 0, 3).unwrap_err().to_string();
    assert_eq!(text, "gather: 0 of 3 rows of width 4, expected at least one and 2^31 numbers");
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 47), device.allocate("large", 48));
    let text = Gather::new(narrow, 2, 3).unwrap().backward(1, large, large, small).unwrap_err().to_string();
    assert_eq!(text, "scatter: dx of 47 bytes, expected at least 48");
    let text = Gather::new(narrow, 3, 2).unwrap().add(1, large, large).unwrap_err().to_string();
    assert_eq!(text, "scatter: 3 rows to add to 2, expected no more");
}
