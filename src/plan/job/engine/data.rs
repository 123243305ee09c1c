//! Data sources, image transforms, and the reader.

use super::Check;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use switchyard_crds as api;
use switchyard_worker_contract::config::{
    Column, Csv, Data, Features, Files, Header, ImageShape, Images, Reader, SampleType, Source, Synthetic, TokenType,
    Tokens,
};

/// Value of white in 8-bit images.
const WHITE: f64 = 255.0;
/// Number of classes of synthetic data.
const CLASSES: u32 = 10;
/// Samples per epoch of synthetic data.
const SAMPLES: u64 = 10_000;

/// Mean and standard deviation of the three channels of CIFAR-10's training images, x / 255.
const CIFAR10: [[f64; 3]; 2] = [[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]];
/// ImageNet's mean and standard deviation, as used by torchvision's models (pytorch/vision
/// `references/classification/presets.py`).
const IMAGENET: [[f64; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];
/// MNIST's mean and standard deviation (pytorch/examples `mnist/main.py`).
const MNIST: [[f64; 1]; 2] = [[0.1307], [0.3081]];

/// Translates the block. `None`, and a fault, if a path is missing.
pub(super) fn data(data: &api::Data, check: &mut Check<'_>) -> Option<Data> {
    let images = images(data, check);
    let features = features(data, &images);
    let validation_fraction = check.decimal("data.validationFraction", &data.validation_fraction);
    Some(Data { source: source(data, check)?, validation_fraction, images, features })
}

/// How features are normalised. A file can turn out to hold images, which then use `images`.
fn features(data: &api::Data, images: &Images) -> Features {
    let can_have = match data.format {
        api::DataFormat::SafeTensors => true,
        api::DataFormat::CSV => data.image.is_none(),
        _ => false,
    };
    match data.normalisation.as_ref().filter(|_| can_have) {
        None => Features::Raw,
        Some(api::Normalisation { source: Some(api::NormalisationSource::TrainingSplit), .. }) => {
            Features::TrainingSplit
        }
        Some(_) => Features::Given { mean: images.mean.clone(), deviation: images.deviation.clone() },
    }
}

fn source(data: &api::Data, check: &mut Check<'_>) -> Option<Source> {
    let image = data.image.map(|image| ImageShape {
        height: image.height.unsigned_abs(),
        width: image.width.unsigned_abs(),
        channels: image.channels.unsigned_abs(),
    });
    let path = data.path.clone();
    if path.is_none() && data.format != api::DataFormat::Synthetic {
        check.fault("data.path", "nothing", "a file or a directory");
    }
    let files = |path| Files { path, include: data.include.clone(), exclude: data.exclude.clone() };
    Some(match data.format {
        api::DataFormat::Text => Source::Text(files(path?)),
        api::DataFormat::Tokens => Source::Tokens(Tokens {
            path: path?,
            token_type: match data.token_type {
                Some(api::TokenType::UInt32) => TokenType::UInt32,
                Some(api::TokenType::UInt16) | None => TokenType::UInt16,
            },
        }),
        api::DataFormat::ImageFolder => Source::ImageFolder(files(path?)),
        api::DataFormat::CIFAR10 => Source::Cifar10(files(path?)),
        api::DataFormat::IDX => Source::Idx(files(path?)),
        api::DataFormat::CSV => Source::Csv(Csv {
            path: path?,
            image,
            label: data.label_column.as_ref().map(|column| match column {
                IntOrString::Int(position) => Column::Position(*position),
                IntOrString::String(name) => Column::Name(name.clone()),
            }),
            header: match data.header {
                Some(api::Header::Present) => Header::Present,
                Some(api::Header::Absent) => Header::Absent,
                Some(api::Header::Auto) | None => Header::Auto,
            },
            largest: check.decimal_or("data.largestValue", data.largest_value.as_ref(), WHITE),
        }),
        api::DataFormat::SafeTensors => Source::SafeTensors(files(path?)),
        api::DataFormat::Synthetic => Source::Synthetic(Synthetic {
            samples: data.samples.map_or(SAMPLES, i64::unsigned_abs),
            image,
            classes: data.classes.map_or(CLASSES, i32::unsigned_abs),
        }),
    })
}

/// The smaller of height and width of the images that the model receives, if the manifest or the
/// format defines it.
pub(super) fn known_size(data: &api::Data) -> Option<u32> {
    let of_source = || match data.format {
        api::DataFormat::CIFAR10 => Some(32),
        api::DataFormat::IDX => Some(28),
        _ => data.image.map(|image| image.height.min(image.width).unsigned_abs()),
    };
    data.image_size.map(i32::unsigned_abs).or_else(of_source)
}

/// Channels of an image, if the manifest or the format defines them.
fn known_channels(data: &api::Data) -> Option<u32> {
    match data.format {
        api::DataFormat::CIFAR10 | api::DataFormat::ImageFolder => Some(3),
        api::DataFormat::IDX => Some(1),
        _ => data.image.map(|image| image.channels.unsigned_abs()),
    }
}

fn images(data: &api::Data, check: &mut Check<'_>) -> Images {
    let crop_padding = data.augmentation.as_ref().map_or(0, |augmentation| augmentation.crop_padding.unsigned_abs());
    if let Some(size) = known_size(data).filter(|size| crop_padding >= *size) {
        let expected = format!("less than the {size} pixels of an image");
        check.fault("data.augmentation.cropPadding", crop_padding.to_string(), expected);
    }
    let [mean, deviation] = match &data.normalisation {
        Some(normalisation) if normalisation.source.is_none() => {
            let got = normalisation.mean.len();
            if let Some(channels) = known_channels(data).filter(|channels| got > 1 && got as u32 != *channels) {
                let expected = format!("1 for all channels, or one for each of {channels}");
                check.fault("data.normalisation.mean", format!("{got} numbers"), expected);
            }
            [("mean", &normalisation.mean), ("deviation", &normalisation.deviation)].map(|(name, texts)| {
                let field = |index: usize| format!("data.normalisation.{name}[{index}]");
                texts.iter().enumerate().map(|(index, text)| check.decimal(&field(index), text)).collect()
            })
        }
        _ => match data.format {
            api::DataFormat::CIFAR10 => CIFAR10.map(Vec::from),
            api::DataFormat::ImageFolder => IMAGENET.map(Vec::from),
            api::DataFormat::IDX => MNIST.map(Vec::from),
            _ => [vec![0.0], vec![1.0]],
        },
    };
    Images {
        size: data.image_size.map_or(0, i32::unsigned_abs),
        crop_padding,
        flip: data.augmentation.as_ref().is_some_and(|augmentation| augmentation.flip.is_on()),
        mean,
        deviation,
    }
}

/// Translates the block. `pinnedMemory` is not included because it follows from the device.
pub(super) fn reader(reader: &api::Reader) -> Reader {
    Reader {
        workers: reader.workers.map(i32::unsigned_abs),
        double_buffer: reader.double_buffer.is_on(),
        infinite: reader.infinite.is_on(),
        sample_type: match reader.sample_type {
            api::SampleType::UInt8 => SampleType::UInt8,
            api::SampleType::Float32 => SampleType::Float32,
        },
        max_bad_samples: reader.max_bad_samples.unsigned_abs(),
    }
}
