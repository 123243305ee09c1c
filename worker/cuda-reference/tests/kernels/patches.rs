use super::pooling::{pixels, result};
use super::{Device, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, rows, run, values};
use half::{bf16, f16};
use switchyard_cuda::kernels::patches::Patches;
use switchyard_cuda::kernels::windows::Windows;
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

const SMALL: Windows = Windows { height: 7, width: 6, kernel: 3, stride: 1, padding: 1 };
const STEM: Windows = Windows { height: 11, width: 12, kernel: 7, stride: 2, padding: 3 };
const SHORTCUT: Windows = Windows { height: 5, width: 6, kernel: 1, stride: 2, padding: 0 };

/// Forward; backward, overwriting and accumulating.
fn check<T: Number>(channels: u32, batch: usize, windows: Windows) -> [Counts; 3] {
    let rows = rows::<T>(channels);
    let patches = Patches::new(rows, batch as u32, windows).unwrap();
    let module = compile(&patches.program());
    let (each, width) = ((windows.height * windows.width) as usize, channels as usize);
    let results = pixels(windows, batch);
    assert_eq!(results.len(), batch * result(windows).iter().product::<usize>());
    let image = matrix::<T>(rows, batch * each, |at| number(1, at));
    let d_patches = matrix::<T>(patches.matrix(), results.len(), |at| number(2, at));
    let old = matrix::<T>(rows, batch * each, |at| number(3, at));
    let [x, before] = [&image, &old].map(|matrix| values::<T>(rows, matrix));
    let gradients = values::<T>(patches.matrix(), &d_patches);
    let mut wanted = vec![vec![0.0; patches.matrix().width as usize]; results.len()];
    let (mut dx, mut added) = (vec![vec![0.0; width]; batch * each], before);
    for (at, (image, within)) in results.iter().enumerate() {
        for (place, pixel) in within {
            let channels = place * width..(place + 1) * width;
            let pixel = image * each + pixel;
            wanted[at][channels.clone()].copy_from_slice(&x[pixel]);
            for sums in [&mut dx[pixel], &mut added[pixel]] {
                sums.iter_mut().zip(&gradients[at][channels.clone()]).for_each(|(sum, dy)| *sum += dy);
            }
        }
    }
    let mut counts = Default::default();
    for seed in 0..super::SEEDS {
        let mut device = Device::default();
        let (x_at, d_at) = (device.upload("x", &image), device.upload("d_patches", &d_patches));
        let patches_at = device.allocate("patches", patches.patches_bytes());
        let (dx_at, sum_at) = (device.allocate("dx", size_of_val(image.as_slice())), device.upload("dx", &old));
        let calls = [
            patches.forward(3, x_at, patches_at).unwrap(),
            patches.backward(3, d_at, dx_at, false).unwrap(),
            patches.backward(3, d_at, sum_at, true).unwrap(),
        ];
        counts = calls.map(|call| run(&mut device, &module, &call, seed));
        let what = format!("{} {channels} channels, {windows:?}", T::NAME);
        assert_eq!(values::<T>(patches.matrix(), &device.download(patches_at)), wanted, "{what}");
        let got = |at| values::<T>(rows, &device.download(at)).concat();
        let taps = f64::from(windows.kernel * windows.kernel);
        assert_close(&what, &got(dx_at), &dx.concat(), 1.01 * T::ROUNDING, 2e-7 * taps);
        assert_close(&what, &got(sum_at), &added.concat(), 1.01 * T::ROUNDING, 2e-7 * taps);
    }
    counts
}

#[test]
fn patches_and_their_gradients_are_exact() {
    for windows in [SMALL, STEM, SHORTCUT, Windows { stride: 3, padding: 2, ..SMALL }] {
        check::<f32>(5, 2, windows);
        check::<f32>(8, 2, windows);
        check::<bf16>(3, 2, windows);
        check::<bf16>(24, 1, windows);
        check::<f16>(1, 2, windows);
    }
}

#[test]
fn patches_are_moved_once() {
    let mut table = String::new();
    let mut note = |name: &str, counts: &[Counts; 3], [image, added]: [usize; 2], [patches, read]: [usize; 2]| {
        // Each pixel is read once per window that contains it; reads beyond the images' size come
        // from caches.
        let floors: [&[(&str, [usize; 2])]; 3] = [
            &[("x", [read, 0]), ("patches", [0, patches])],
            &[("d_patches", [read, 0]), ("dx", [0, image])],
            &[("d_patches", [read, 0]), ("dx", [added, added])],
        ];
        for ((counts, floors), kernel) in counts.iter().zip(floors).zip(["patches", "backward", "backward, added"]) {
            assert_minimal_traffic(&format!("{name}, {kernel}"), counts, floors);
            table += &line(&format!("{name}, {kernel}"), counts);
        }
    };
    let (bf16, f32) = (2 * 64 * 64 * 2, 2 * 64 * 64 * 4);
    // Windows at the border have fewer than 9 pixels: 22 of 24 rows and columns.
    let counts = check::<bf16>(64, 2, Windows { height: 8, width: 8, ..SMALL });
    note("bf16 2 x 8 x 8 x 64, 3 x 3", &counts, [bf16, bf16], [9 * bf16, 9 * bf16 * 22 * 22 / 576]);
    // Every fourth pixel is in a window; nothing is added to the others.
    let counts = check::<f32>(64, 2, Windows { height: 8, width: 8, ..SHORTCUT });
    note("f32 2 x 8 x 8 x 64, 1 x 1 stride 2", &counts, [f32, f32 / 4], [f32 / 4, f32 / 4]);
    // With three channels, elements are read one by one, so a 32-byte sector counts again for each
    // of them.
    let windows = Windows { height: 16, width: 16, ..STEM };
    let [forward, ..] = &check::<bf16>(3, 2, windows);
    assert_minimal_traffic("stem", forward, &[("patches", [0, 2 * 64 * 152 * 2])]);
    table += &line("bf16 2 x 16 x 16 x 3, 7 x 7 stride 2, patches", forward);
    insta::assert_snapshot!("patches", table);
}

#[test]
fn unsupported_windows_are_refused() {
    let rows = Rows { element: Element::F32, width: 4, pitch: 4 };
    let text = Patches::new(rows, 2, Windows { stride: 0, ..SMALL }).unwrap_err().to_string();
    let expected = "patches: 2 images of 7 x 6 pixels, windows of 3, stride 0, padding 1, expected at least one of each, padding below \
                    the window, and fewer than 2^31 numbers";
    assert_eq!(text, expected);
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 1007), device.allocate("large", 1 << 20));
    let text = Patches::new(rows, 1, SMALL).unwrap().backward(1, small, large, false).unwrap_err().to_string();
    assert_eq!(text, "patches_backward: d_patches of 1007 bytes, expected at least 6048");
}
