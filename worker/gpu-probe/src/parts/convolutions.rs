//! Convolutions at ResNet-50 shapes, in all three directions.

use super::{Probe, gather};
use crate::numbers::{pattern, relative_error, sample_indices, short};
use crate::outcome::Outcome;
use crate::peaks::peak;
use half::bf16;
use serde_json::{Value, json};
use std::sync::Arc;
use switchyard_cuda::convolution::{Convolution, Direction};
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Buffer, Context};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::operation::{Limits, Operation, Plan, Planned};

const IMAGES: usize = 128;
const WORKSPACE_BYTES: usize = 512 << 20;
/// Channels, size, filters, window, stride and padding of the first layer, and of one layer of each
/// kind per stage.
const LAYERS: [[usize; 6]; 9] = [
    [3, 224, 64, 7, 2, 3],
    [64, 56, 64, 3, 1, 1],
    [64, 56, 256, 1, 1, 0],
    [256, 56, 512, 1, 2, 0],
    [128, 28, 128, 3, 1, 1],
    [512, 28, 128, 1, 1, 0],
    [256, 14, 256, 3, 1, 1],
    [1024, 14, 256, 1, 1, 0],
    [512, 7, 512, 3, 1, 1],
];
/// Layers of a rehearsal, with two images.
const REHEARSED: [[usize; 6]; 2] = [[3, 9, 8, 7, 2, 3], [8, 5, 8, 3, 1, 1]];

const DIRECTIONS: [Direction; 3] = [Direction::Forward, Direction::Images, Direction::Filters];

/// NHWC in bf16, with f32 accumulation. `direction` is the forward one.
fn convolution(images: usize, [channels, size, filters, window, stride, padding]: [usize; 6]) -> Convolution {
    Convolution {
        direction: Direction::Forward,
        element: Element::Bf16,
        adds: false,
        arithmetic: Arithmetic::Ieee,
        images,
        height: size,
        width: size,
        channels,
        pitch: channels,
        filters,
        result_pitch: filters,
        window,
        stride,
        padding,
    }
}

/// Height and width of the result.
fn result(of: &Convolution) -> usize {
    of.result().map_or(0, |[height, _]| height)
}

/// Elements of the images, the filters and the results.
fn elements(of: &Convolution) -> [usize; 3] {
    [
        of.images * of.height * of.width * of.channels,
        of.filters * of.window * of.window * of.channels,
        of.images * result(of) * result(of) * of.filters,
    ]
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let cudnn = Cudnn::start(&probe.cudnn()?)?;
    let (images, layers) = if probe.rehearse { (2, &REHEARSED[..]) } else { (IMAGES, &LAYERS[..]) };
    let workspace = context.zeros(if probe.rehearse { 1 << 20 } else { WORKSPACE_BYTES })?;
    let peak = peak(&device.name).map(|peak| peak.bf16);
    let mut rows = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let forward = convolution(images, *layer);
        let [images, filters, results] = elements(&forward);
        let upload = |seed: u32, len: usize| {
            context.upload(&(0..len).map(|index| bf16::from_f32(pattern(seed, index))).collect::<Vec<_>>())
        };
        let inputs = [upload(1, images)?, upload(2, filters)?, upload(3, results)?];
        let operations = 2.0 * (results * forward.window * forward.window * forward.channels) as f64;
        // The first layer needs no gradient of its images.
        for direction in DIRECTIONS.into_iter().filter(|direction| index > 0 || *direction != Direction::Images) {
            let [channels, size, filters, window, stride, _] = *layer;
            let row = json!({
                "direction": format!("{direction:?}"),
                "channels": channels, "size": size, "filters": filters, "window": window, "stride": stride,
            });
            let of = Convolution { direction, ..forward };
            let measured = measure(&context, &cudnn, &of, inputs.each_ref(), &workspace).map(|(seconds, error)| {
                let tflops = operations / seconds / 1e12;
                json!({
                    "microseconds": short(seconds * 1e6),
                    "TFLOPs": short(tflops),
                    "shareOfPeak": peak.map(|peak| short(tflops / peak)),
                    "relativeError": short(error),
                })
            });
            rows.push((row, measured));
        }
    }
    let figures = json!({"device": device.name, "images": images, "precision": "Bf16", "layout": "NHWC"});
    gather(figures, "convolutions", rows)
}

/// Seconds and relative error of one direction.
fn measure(
    context: &Context,
    cudnn: &Cudnn,
    of: &Convolution,
    inputs: [&Buffer; 3],
    workspace: &Buffer,
) -> Result<(f64, f64), Outcome> {
    let written = of.direction.written();
    let result = context.zeros(inputs[written].bytes())?;
    let mut buffers = inputs;
    buffers[written] = &result;
    let limits = Limits { deterministic: true, workspace_bytes: workspace.bytes() };
    let plan = Arc::new(Plan::new(cudnn, &Operation::Convolution(*of), limits)?);
    let planned = Planned::new(&plan, &buffers.map(Buffer::span), Some(workspace.span()))?;
    let stream = context.stream()?;
    let seconds = context.time(&stream, 5, || planned.run(&stream))?;
    Ok((seconds, error(&result, of)?))
}

/// Number of compared elements.
const SAMPLES: usize = 31;

/// Relative error of sampled elements.
fn error(result: &Buffer, of: &Convolution) -> Result<f64, Outcome> {
    let len = elements(of)[of.direction.written()];
    let (mut got, mut wanted) = (Vec::new(), Vec::new());
    for place in sample_indices(len, SAMPLES) {
        got.extend(result.download::<bf16>(place..place + 1)?.iter().map(|value| value.to_f32()));
        wanted.push(element(of, place) as f32);
    }
    let error = relative_error(&got, &wanted);
    // The result has an 8-bit mantissa. So have the partial sums of the filter gradient, which
    // accumulates millions of products.
    let limit = 1.0 / 64.0;
    if error > limit {
        let text = format!("relative error {error:e} of {of:?}, expected at most {limit}");
        return Err(Outcome::failed("convolution", text));
    }
    Ok(error)
}

/// The indices of an element along axes of these lengths. The last axis is contiguous.
fn indices<const N: usize>(mut place: usize, lengths: [usize; N]) -> [usize; N] {
    let mut indices = [0; N];
    for (index, length) in indices.iter_mut().zip(lengths).rev() {
        (place, *index) = (place / length, place % length);
    }
    indices
}

/// One element of a result, computed from the definition: `y[n,p,q,k] = sum x[n, p*stride + r -
/// padding, ..., c] * w[k,r,s,c]`.
fn element(of: &Convolution, place: usize) -> f64 {
    let Convolution { images, channels, height: size, filters, window, stride, padding, .. } = *of;
    let result = result(of);
    let x = |n: usize, h: usize, w: usize, c: usize| ((n * size + h) * size + w) * channels + c;
    let weight = |k: usize, r: usize, s: usize, c: usize| ((k * window + r) * window + s) * channels + c;
    let y = |n: usize, p: usize, q: usize, k: usize| ((n * result + p) * result + q) * filters + k;
    // Maps result and window coordinates to an image coordinate, and back.
    let pixel = |p: usize, r: usize| (p * stride + r).checked_sub(padding).filter(|h| *h < size);
    let place_of = |h: usize, r: usize| {
        let shifted = (h + padding).checked_sub(r)?;
        (shifted % stride == 0 && shifted / stride < result).then_some(shifted / stride)
    };
    let value = |seed, index| f64::from(pattern(seed, index));
    let taps = || (0..window).flat_map(move |r| (0..window).map(move |s| (r, s)));
    let mut sum = 0.0;
    match of.direction {
        Direction::Forward => {
            let [n, p, q, k] = indices(place, [images, result, result, filters]);
            for (r, s) in taps() {
                let (Some(h), Some(w)) = (pixel(p, r), pixel(q, s)) else { continue };
                sum += (0..channels).map(|c| value(1, x(n, h, w, c)) * value(2, weight(k, r, s, c))).sum::<f64>();
            }
        }
        Direction::Images => {
            let [n, h, w, c] = indices(place, [images, size, size, channels]);
            for (r, s) in taps() {
                let (Some(p), Some(q)) = (place_of(h, r), place_of(w, s)) else { continue };
                sum += (0..filters).map(|k| value(3, y(n, p, q, k)) * value(2, weight(k, r, s, c))).sum::<f64>();
            }
        }
        Direction::Filters => {
            let [k, r, s, c] = indices(place, [filters, window, window, channels]);
            for [n, p, q] in (0..images * result * result).map(|at| indices(at, [images, result, result])) {
                let (Some(h), Some(w)) = (pixel(p, r), pixel(q, s)) else { continue };
                sum += value(1, x(n, h, w, c)) * value(3, y(n, p, q, k));
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All three directions are derivatives of one scalar: `<y(x, w), dy> = <x, dx(dy, w)> = <w,
    /// dw(x, dy)>`.
    #[test]
    fn the_directions_are_adjoint() {
        let forward = convolution(2, [3, 7, 4, 3, 2, 1]);
        let inner = |direction: Direction, seed: u32| -> f64 {
            let of = Convolution { direction, ..forward };
            let len = elements(&of)[direction.written()];
            (0..len).map(|place| element(&of, place) * f64::from(pattern(seed, place))).sum()
        };
        let forward = inner(Direction::Forward, 3);
        assert!(forward.abs() > 1e-3, "{forward}");
        assert!((inner(Direction::Images, 1) - forward).abs() < 1e-9);
        assert!((inner(Direction::Filters, 2) - forward).abs() < 1e-9);
    }

    /// With a stride, most image gradients are zero, so a comparison of zeros would prove nothing.
    #[test]
    fn every_comparison_includes_nonzero_elements() {
        for layer in LAYERS {
            for direction in DIRECTIONS {
                let of = Convolution { direction, ..convolution(2, layer) };
                let places = sample_indices(elements(&of)[direction.written()], SAMPLES);
                let seen = places.filter(|place| element(&of, *place) != 0.0).count();
                assert!(seen >= 4, "{seen} of {SAMPLES} in {of:?}");
            }
        }
    }
}
