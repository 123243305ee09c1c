use super::{Device, Number, assert_minimal_traffic, compile, line, number, rows, run, values};
use half::{bf16, f16};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::Rows;
use switchyard_cuda::kernels::input::Input;
use switchyard_cuda_reference::Counts;

/// Mean and standard deviation per channel.
fn normalisation(channels: usize) -> Vec<[f32; 2]> {
    (0..channels).map(|channel| [0.4 + 0.05 * channel as f32, 0.2 + 0.03 * channel as f32]).collect()
}

/// Images as bytes, compared with the CPU bit for bit.
fn images<T: Number>(width: u32, count: usize, channels: usize) -> Counts {
    let rows = rows::<T>(width);
    let input = Input::new(rows, count as u32, Some(channels as u32)).unwrap();
    let module = compile(&input.program());
    let mut bytes: Vec<u8> = (0..count * width as usize).map(|at| (at * at * 31 + at * 7) as u8).collect();
    let table = normalisation(channels);
    let of = |(at, &byte): (usize, &u8)| {
        let [mean, deviation] = table[at % channels];
        T::of((f32::from(byte) / 255.0 - mean) / deviation).get()
    };
    let wanted: Vec<f64> = bytes.iter().enumerate().map(of).collect();
    bytes.resize(input.delivered_bytes(), 0xee);
    let mut counts = Counts::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let (from, channels) = (device.upload("from", &bytes), device.upload("channels", table.as_flattened()));
        let to = device.allocate("to", count * rows.pitch as usize * size_of::<T>());
        counts = run(&mut device, &module, &input.call(3, from, Some(channels), to).unwrap(), seed);
        assert_eq!(values::<T>(rows, &device.download(to)).concat(), wanted, "{} {count} x {width}", T::NAME);
    }
    counts
}

/// f32 features.
fn features<T: Number>(width: u32, count: usize) -> Counts {
    let rows = rows::<T>(width);
    let input = Input::new(rows, count as u32, None).unwrap();
    let module = compile(&input.program());
    let given: Vec<f32> = (0..count * width as usize).map(|at| number(1, at)).collect();
    let wanted: Vec<f64> = given.iter().map(|value| T::of(*value).get()).collect();
    let mut counts = Counts::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let from = device.upload("from", &given);
        let to = device.allocate("to", count * rows.pitch as usize * size_of::<T>());
        counts = run(&mut device, &module, &input.call(3, from, None, to).unwrap(), seed);
        assert_eq!(values::<T>(rows, &device.download(to)).concat(), wanted, "{} {count} x {width}", T::NAME);
    }
    counts
}

#[test]
fn samples_match_the_cpu_bit_for_bit() {
    // Pixels as rows, and images as rows.
    images::<f32>(3, 1000, 3);
    images::<bf16>(3, 997, 3);
    images::<f16>(1, 5, 1);
    images::<bf16>(75, 9, 5);
    images::<f32>(48, 7, 3);
    features::<f32>(7, 6);
    features::<bf16>(784, 5);
    features::<f16>(33, 40);
}

#[test]
fn samples_are_moved_once() {
    let mut table = String::new();
    let mut note = |what: &str, counts: Counts, floors: [usize; 2]| {
        assert_minimal_traffic(what, &counts, &[("from", [floors[0], 0]), ("to", [0, floors[1]])]);
        table += &line(what, &counts);
    };
    // A pixel of three channels fills 12 (f32) or 6 (bf16) of 16 bytes; the bytes moved include the
    // gaps.
    note("input f32 2048 x 3 bytes", images::<f32>(3, 2048, 3), [2048 * 3, 2048 * 16]);
    note("input bf16 2048 x 3 bytes", images::<bf16>(3, 2048, 3), [2048 * 3, 2048 * 16]);
    note("input bf16 16 x 768 bytes", images::<bf16>(768, 16, 3), [16 * 768, 16 * 768 * 2]);
    note("input bf16 16 x 768 numbers", features::<bf16>(768, 16), [16 * 768 * 4, 16 * 768 * 2]);
    insta::assert_snapshot!("input", table);
}

#[test]
fn unsupported_samples_are_refused() {
    let rows = Rows { element: Element::F32, width: 7, pitch: 8 };
    let expected =
        "input: 2 rows of width 7 of pixels with 3 channels, expected at least one, whole pixels and 2^31 numbers";
    assert_eq!(Input::new(rows, 2, Some(3)).unwrap_err().to_string(), expected);
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 13), device.allocate("large", 64));
    let images = Input::new(rows, 2, Some(7)).unwrap();
    let text = images.call(1, small, Some(large), large).unwrap_err().to_string();
    assert_eq!(text, "input: from of 13 bytes, expected at least 16");
    let text = images.call(1, large, None, large).unwrap_err().to_string();
    assert_eq!(text, "input: mean and deviation, expected with images and not without");
}
