//! Measures whether ResNet-50 waits for its input: images from a file, cropped, mirrored and passed
//! on as bytes that the device normalises, versus synthetic samples, in alternating rounds.

use super::machine::state;
use super::steps::{self, Round};
use super::{Probe, gather};
use crate::jobs::CLASSES;
use crate::numbers::{mib, short};
use crate::outcome::Outcome;
use crate::scratch;
use safetensors::{Dtype, View};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::path::PathBuf;
use switchyard_worker_contract::config::*;

/// Images in the file, which the reader keeps in memory: 308 MB at 224 x 224 pixels.
const IMAGES: usize = 2048;
/// Zero padding on each side of an image before the random crop.
const PADDING: u32 = 8;
/// Required speed with the file, relative to synthetic samples.
const GOAL: f64 = 0.97;
const ROUNDS: usize = 5;
/// Reader threads, if there are that many cores.
const WORKERS: usize = 8;

pub(super) fn resnet(probe: &Probe) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let worker = probe.worker()?;
    let case = steps::resnet50_case(probe);
    let (images, rounds, steps) = if probe.rehearse { (64, 1, 4) } else { (IMAGES, ROUNDS, 80) };
    let config = steps::largest(probe, &worker, &case)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let reader = Reader { workers: Some(WORKERS.min(cores) as u32), sample_type: SampleType::UInt8, ..config.reader };
    let config = EngineConfig { reader, length: Length::Steps(steps), fetch_every_steps: (steps / 4) as u32, ..config };
    let Source::Synthetic(Synthetic { image: Some(shape), .. }) = config.data.source else {
        return Err(Outcome::failed("input", "got a case without images; expected ResNet's"));
    };
    let (path, bytes) = written(&shape, images).map_err(|text| Outcome::failed("a file of images", text))?;
    let files = Files { path: path.display().to_string(), include: Vec::new(), exclude: Vec::new() };
    let [mean, deviation] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]].map(|channels| channels.to_vec());
    let read = Data {
        source: Source::SafeTensors(files),
        images: Images { size: 0, crop_padding: PADDING, flip: true, mean, deviation },
        features: Features::Raw,
        ..config.data.clone()
    };
    let sides = [("file", EngineConfig { data: read, ..config.clone() }), ("synthetic", config.clone())];
    let before = state();
    let mut all = [const { Vec::new() }; 2];
    let mut ran = [const { Ok(()) }; 2];
    for _ in 0..rounds {
        for (((_, config), rounds), ran) in sides.iter().zip(&mut all).zip(&mut ran) {
            if ran.is_ok() {
                *ran = steps::measure_worker(&worker, config).map(|round| rounds.push(round));
            }
        }
    }
    let per_second = f64::from(config.batch_size_per_process) * 1e3;
    let mut what = json!({
        "device": device.name, "batch": config.batch_size_per_process, "readers": config.reader.workers, "rounds": rounds,
        "steps": steps, "images": images, "fileMiB": mib(bytes as u64), "stateBefore": before, "stateAfter": state(),
        "goal": GOAL,
    });
    if let Some(ratio) = ratio(&all) {
        what["ratio"] = short(ratio).into();
        what["isWithinGoal"] = (ratio >= GOAL).into();
    }
    let rows = sides.iter().zip(&all).zip(ran).map(|(((name, _), rounds), ran)| {
        let figures = ran.map(|()| steps::figures(rounds, per_second));
        (json!({"side": name}), figures)
    });
    gather(what, "sides", rows.collect())
}

/// Speed of the first side relative to the second: the median over rounds, in which both were
/// measured back to back.
fn ratio([first, second]: &[Vec<Round>; 2]) -> Option<f64> {
    let ratios: Vec<f64> = first.iter().zip(second).map(|(first, second)| second.ms / first.ms).collect();
    (!ratios.is_empty()).then(|| steps::median(ratios))
}

/// Writes a file of RGB noise images and returns its path and size. Content does not affect the
/// reader's speed.
fn written(shape: &ImageShape, images: usize) -> Result<(PathBuf, usize), String> {
    let path = scratch::folder("images").map_err(|error| error.to_string())?.join("images.safetensors");
    let (height, width) = (shape.height as usize, shape.width as usize);
    let shape = vec![images, height, width, shape.channels as usize];
    let mut state = 0x9e37_79b9_u32;
    let noise = (0..shape.iter().product()).map(|_| {
        // Marsaglia's xorshift.
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 24) as u8
    });
    let pixels = Tensor { dtype: Dtype::U8, shape, bytes: noise.collect() };
    let labels = Tensor {
        dtype: Dtype::U8,
        shape: vec![images],
        bytes: (0..images).map(|image| (image % CLASSES as usize) as u8).collect(),
    };
    let bytes = pixels.bytes.len() + labels.bytes.len();
    safetensors::serialize_to_file([("images", pixels), ("labels", labels)], None, &path)
        .map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((path, bytes))
}

/// An array in the file.
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_the_median_of_complete_rounds() {
        let rounds = |all: &[f64]| all.iter().map(|ms| Round { ms: *ms, ..Round::default() }).collect::<Vec<_>>();
        assert_eq!(ratio(&[rounds(&[10.0, 20.0, 8.0]), rounds(&[9.0, 19.0, 8.0])]), Some(0.95));
        assert_eq!(ratio(&[rounds(&[10.0]), rounds(&[])]), None);
    }
}
