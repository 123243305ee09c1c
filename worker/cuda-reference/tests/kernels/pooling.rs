use super::{Device, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, rows, run, values};
use half::{bf16, f16};
use switchyard_cuda::kernels::average_pool::AveragePool;
use switchyard_cuda::kernels::max_pool::MaxPool;
use switchyard_cuda::kernels::windows::Windows;
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

const STEM: Windows = Windows { height: 9, width: 8, kernel: 3, stride: 2, padding: 1 };

/// Number of windows per column and per row.
pub fn result(windows: Windows) -> [usize; 2] {
    [windows.height, windows.width]
        .map(|side| ((side + 2 * windows.padding - windows.kernel) / windows.stride + 1) as usize)
}

/// For each window its image, and for each of its pixels inside the image the position in the
/// window and the pixel's index in the batch.
pub fn pixels(windows: Windows, batch: usize) -> Vec<(usize, Vec<(usize, usize)>)> {
    let [kernel, stride, padding] = [windows.kernel, windows.stride, windows.padding].map(|n| n as i64);
    let (height, width) = (i64::from(windows.height), i64::from(windows.width));
    let [lines, columns] = result(windows);
    let within = |line: usize, column: usize| {
        let place = move |place: i64| {
            let (y, x) =
                (line as i64 * stride - padding + place / kernel, column as i64 * stride - padding + place % kernel);
            ((0..height).contains(&y) && (0..width).contains(&x)).then_some((place as usize, (y * width + x) as usize))
        };
        (0..kernel * kernel).filter_map(place).collect::<Vec<_>>()
    };
    let all = (0..batch).flat_map(|image| (0..lines).map(move |line| (image, line)));
    all.flat_map(|(image, line)| (0..columns).map(move |column| (image, line, column)))
        .map(|(image, line, column)| (image, within(line, column)))
        .collect()
}

/// Few distinct values, so that windows contain ties.
fn coarse(at: usize) -> f32 {
    (number(1, at) * 4.0).round()
}

/// Forward; backward, overwriting and accumulating.
fn max<T: Number>(channels: u32, batch: usize, windows: Windows) -> [Counts; 3] {
    let rows = rows::<T>(channels);
    let pool = MaxPool::new(rows, batch as u32, windows).unwrap();
    let module = compile(&pool.program());
    let each = (windows.height * windows.width) as usize;
    let results = pixels(windows, batch);
    let image = matrix::<T>(rows, batch * each, coarse);
    let d_result = matrix::<T>(rows, results.len(), |at| number(2, at));
    let old = matrix::<T>(rows, batch * each, |at| number(3, at));
    let [x, dy, before] = [&image, &d_result, &old].map(|matrix| values::<T>(rows, matrix));
    let mut y = vec![vec![0.0; channels as usize]; results.len()];
    let (mut dx, mut added) = (vec![vec![0.0; channels as usize]; batch * each], before.clone());
    for (at, (image, within)) in results.iter().enumerate() {
        for channel in 0..channels as usize {
            let number = |pixel: usize| x[image * each + pixel][channel];
            let (_, first) =
                within.iter().fold(within[0], |best, next| if number(next.1) > number(best.1) { *next } else { best });
            y[at][channel] = number(first);
            dx[image * each + first][channel] += dy[at][channel];
            added[image * each + first][channel] += dy[at][channel];
        }
    }
    let mut counts = Default::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let (x_at, dy_at) = (device.upload("x", &image), device.upload("dy", &d_result));
        let [y_at, unkept_at] = ["y", "unkept"].map(|name| device.allocate(name, size_of_val(d_result.as_slice())));
        let (dx_at, sum_at) = (device.allocate("dx", size_of_val(image.as_slice())), device.upload("dx", &old));
        let places = device.allocate("places", pool.places_bytes());
        let forward = pool.forward(3, x_at, y_at, Some(places)).unwrap();
        let backward = pool.backward(3, dy_at, places, dx_at, false).unwrap();
        let adding = pool.backward(3, dy_at, places, sum_at, true).unwrap();
        counts = [forward, backward, adding].map(|call| run(&mut device, &module, &call, seed));
        run(&mut device, &module, &pool.forward(3, x_at, unkept_at, None).unwrap(), seed);
        let got = |at| values::<T>(rows, &device.download(at));
        let what = format!("{} {channels} channels, {windows:?}", T::NAME);
        assert_eq!((&got(y_at), &got(unkept_at)), (&y, &y), "{what}");
        assert_close(&what, &got(dx_at).concat(), &dx.concat(), 1.01 * T::ROUNDING, 1e-6);
        assert_close(&what, &got(sum_at).concat(), &added.concat(), 1.01 * T::ROUNDING, 1e-6);
    }
    counts
}

#[test]
fn max_pooling_and_its_gradient_are_exact() {
    for windows in [
        STEM,
        Windows { height: 5, width: 7, kernel: 2, stride: 2, padding: 0 },
        Windows { height: 4, width: 4, kernel: 4, stride: 3, padding: 2 },
        Windows { height: 6, width: 5, kernel: 1, stride: 2, padding: 0 },
    ] {
        max::<f32>(5, 2, windows);
        max::<bf16>(3, 2, windows);
        max::<f16>(16, 2, windows);
    }
}

#[test]
fn a_nan_is_the_maximum() {
    let pool = MaxPool::new(rows::<f32>(4), 1, STEM).unwrap();
    let module = compile(&pool.program());
    let mut image = vec![1.0f32; 9 * 8 * 4];
    image[4 * 27 + 2] = f32::NAN;
    let mut device = Device::default();
    let [x, y] = [device.upload("x", &image), device.allocate("y", 5 * 4 * 16)];
    run(&mut device, &module, &pool.forward(1, x, y, None).unwrap(), 0);
    // Pixel 3 of row 3 is in windows 1 and 2 in both directions.
    let nan: Vec<usize> = (0..80).filter(|&at| device.download::<f32>(y)[at].is_nan()).collect();
    assert_eq!(nan, [5, 6, 9, 10].map(|window| 4 * window + 2));
}

/// Forward; backward, overwriting and accumulating.
fn average<T: Number>(channels: u32, batch: usize, pixels: usize) -> [Counts; 3] {
    let rows = rows::<T>(channels);
    let pool = AveragePool::new(rows, batch as u32, pixels as u32).unwrap();
    let module = compile(&pool.program());
    let image = matrix::<T>(rows, batch * pixels, |at| number(1, at));
    let d_mean = matrix::<T>(rows, batch, |at| number(2, at));
    let old = matrix::<T>(rows, batch * pixels, |at| number(3, at));
    let [x, dy, before] = [&image, &d_mean, &old].map(|matrix| values::<T>(rows, matrix));
    let mean = |image: &[Vec<f64>], channel: usize| image.iter().map(|row| row[channel]).sum::<f64>() / pixels as f64;
    let y: Vec<f64> =
        x.chunks(pixels).flat_map(|image| (0..channels as usize).map(|channel| mean(image, channel))).collect();
    let share = |row: usize| dy[row / pixels].iter().map(|dy| dy / pixels as f64).collect::<Vec<_>>();
    let dx: Vec<f64> = (0..batch * pixels).flat_map(share).collect();
    let added: Vec<f64> = dx.iter().zip(before.concat()).map(|(dx, before)| dx + before).collect();
    let mut counts = Default::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let (x_at, dy_at) = (device.upload("x", &image), device.upload("dy", &d_mean));
        let y_at = device.allocate("y", size_of_val(d_mean.as_slice()));
        let (dx_at, sum_at) = (device.allocate("dx", size_of_val(image.as_slice())), device.upload("dx", &old));
        let calls = [
            pool.forward(3, x_at, y_at).unwrap(),
            pool.backward(3, dy_at, dx_at, false).unwrap(),
            pool.backward(3, dy_at, sum_at, true).unwrap(),
        ];
        counts = calls.map(|call| run(&mut device, &module, &call, seed));
        let got = |at| values::<T>(rows, &device.download(at)).concat();
        let what = format!("{} {batch} x {pixels} x {channels}", T::NAME);
        assert_close(&what, &got(y_at), &y, 1.01 * T::ROUNDING, 1e-6 + T::NEAR_ZERO);
        assert_close(&what, &got(dx_at), &dx, 1.01 * T::ROUNDING, 1e-7 + T::NEAR_ZERO);
        assert_close(&what, &got(sum_at), &added, 1.01 * T::ROUNDING, 1e-6 + T::NEAR_ZERO);
    }
    counts
}

#[test]
fn average_pooling_and_its_gradient_are_exact() {
    average::<f32>(5, 3, 49);
    average::<bf16>(3, 2, 1);
    average::<f16>(33, 2, 6);
    average::<bf16>(2048, 2, 4);
}

#[test]
fn images_are_moved_once() {
    let mut table = String::new();
    let mut note = |name: &str, counts: &Counts, floors: &[(&str, [usize; 2])]| {
        assert_minimal_traffic(name, counts, floors);
        table += &line(name, counts);
    };
    // A window reads its nine pixels, and a pixel reads the windows that contain it, close in time
    // to their neighbours; reads beyond the size come from caches. Borders save a little.
    let windows = Windows { height: 16, width: 16, ..STEM };
    let (image, result) = (2 * 256 * 64 * 2, 2 * 64 * 64 * 2);
    let [forward, backward, adding] = max::<bf16>(64, 2, windows);
    note("max pool bf16", &forward, &[("x", [9 * result, 0]), ("y", [0, result]), ("places", [0, result / 2])]);
    let windows = [("dy", [9 * result, 0]), ("places", [9 * result / 2, 0])];
    note("max pool backward bf16", &backward, &[&windows[..], &[("dx", [0, image])]].concat());
    note("max pool backward bf16, added", &adding, &[&windows[..], &[("dx", [image, image])]].concat());
    let (image, mean) = (2 * 49 * 512 * 2, 2 * 512 * 2);
    let [forward, backward, adding] = average::<bf16>(512, 2, 49);
    note("average pool bf16", &forward, &[("x", [image, 0]), ("y", [0, mean])]);
    note("average pool backward bf16", &backward, &[("dy", [mean, 0]), ("dx", [0, image])]);
    note("average pool backward bf16, added", &adding, &[("dy", [mean, 0]), ("dx", [image, image])]);
    insta::assert_snapshot!("pooling", table);
}

#[test]
fn unsupported_pools_are_refused() {
    let rows = Rows { element: Element::F32, width: 4, pitch: 4 };
    let text = MaxPool::new(rows, 2, Windows { height: 1, padding: 0, ..STEM }).unwrap_err().to_string();
    let expected = "max_pool: 2 images of 1 x 8 pixels, windows of 3, stride 2, padding 0, expected at least one of each, padding below \
                    the window, and fewer than 2^31 numbers";
    assert_eq!(text, expected);
    let text = MaxPool::new(rows, 2, Windows { kernel: 17, padding: 8, ..STEM }).unwrap_err().to_string();
    assert_eq!(text, "max_pool: windows of 17 pixels, expected at most 16");
    let text = AveragePool::new(rows, 2, 0).unwrap_err().to_string();
    let expected =
        "average_pool: 2 images of 0 pixels with 4 channels, expected at least one of each and fewer than 2^31 numbers";
    assert_eq!(text, expected);
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 319), device.allocate("large", 1 << 20));
    let text = MaxPool::new(rows, 1, STEM).unwrap().forward(1, large, small, None).unwrap_err().to_string();
    assert_eq!(text, "max_pool: y of 319 bytes, expected at least 320");
}
