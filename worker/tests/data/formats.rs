//! Formats that are kept in memory: what is read, and what is refused.

use crate::support::*;
use safetensors::tensor::{Dtype, TensorView, serialize};
use switchyard_worker::data::{Kind, Task};
use switchyard_worker_contract::config::{Csv, Data, Header, ImageShape, Source};
use switchyard_worker_contract::event::Item;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn cifar10() {
    let directory = cifar_directory();
    // The red, green and blue of a pixel are separate in the file and adjacent in the sample.
    let mut records = cifar(&[(7, 0), (0, 0)]);
    (records[1], records[1 + 1024], records[1 + 2048]) = (11, 22, 33);
    directory.write("data_batch_1.bin", records);
    let source = Source::Cifar10(directory.files());
    let dataset = open(&data(source.clone()), &Task::Classify).unwrap();
    let facts = dataset.facts();
    assert_eq!((facts.train_samples, facts.validation_samples, facts.files), (10, 2, 6));
    assert_eq!((facts.item, facts.bytes, facts.digest.len()), (Item::Images, 12 * 3073, 32));
    assert_eq!(facts.sample, "32x32x3 pixels in 10 classes");
    let first = training(&dataset).into_iter().find(|(_, class)| *class == 7).unwrap();
    assert_eq!(first.0[..6], [11, 22, 33, 0, 0, 0]);
    assert_eq!(validation(&dataset).targets, [5, 9]);

    directory.write("test_batch.bin", &cifar(&[(3, 0)])[1..]);
    assert_error(&data(source.clone()), &Task::Classify, &["test_batch.bin", "3072 bytes", "a multiple of 3073"]);
    directory.write("test_batch.bin", cifar(&[(3, 0), (10, 0)]));
    assert_error(&data(source.clone()), &Task::Classify, &["label 10 of sample 1", "classes 0 to 9"]);
    directory.write("data_batch_4.bin", "");
    assert_error(&data(source.clone()), &Task::Classify, &["data_batch_4.bin", "0 bytes"]);
    std::fs::remove_file(directory.path("data_batch_4.bin")).unwrap();
    assert_error(&data(source.clone()), &Task::Classify, &["data_batch_4.bin is missing"]);
    std::fs::create_dir(directory.path("data_batch_4.bin")).unwrap();
    assert_error(&data(source), &Task::Classify, &["data_batch_4.bin is a directory"]);
    assert_error(&data(Source::Cifar10(files(&directory.path("gone")))), &Task::Classify, &["nothing at", "gone"]);
}

#[test]
fn mnist() {
    let directory = idx_directory();
    let source = || data(Source::Idx(directory.files()));
    let dataset = open(&source(), &Task::Classify).unwrap();
    assert_eq!(dataset.kind(), Kind::Images { height: 2, width: 2, channels: 1, classes: 5 });
    let expected = [(vec![0, 1, 2, 3], 2), (vec![4, 5, 6, 7], 0), (vec![8, 9, 10, 11], 1)];
    assert_eq!(training(&dataset), expected);
    assert_eq!(validation(&dataset).pixels, (100..108).collect::<Vec<u8>>());

    let bad = |name: &str, file: &[u8], words: &[&str]| {
        let good = std::fs::read(directory.path(name)).unwrap();
        directory.write(name, file);
        assert_error(&source(), &Task::Classify, words);
        directory.write(name, good);
    };
    let images = "train-images-idx3-ubyte";
    bad(images, &[], &[images, "0 bytes", "header of an IDX file"]);
    bad(images, &idx(&[3, 2], &[0; 6]), &["0x00000802", "0x00000803"]);
    bad(images, &idx(&[3, 2, 2], &[0; 11]), &["11 bytes after the header", "[3, 2, 2]"]);
    bad(images, &idx(&[u32::MAX, u32::MAX, u32::MAX], &[0; 11]), &["11 bytes after the header"]);
    bad(images, &idx(&[0, 2, 2], &[]), &["above 0"]);
    bad(images, &idx(&[1, 1, 20_000], &[0; 20_000]), &["20000x1 pixels", "at most 16384"]);
    bad("train-labels-idx1-ubyte", &idx(&[2], &[1, 2]), &["2 labels", "3, one for each image"]);
    bad("t10k-images-idx3-ubyte", &idx(&[2, 2, 1], &[0; 4]), &["images of 2x1 pixels", "2x2"]);
    let labels = directory.path("train-labels-idx1-ubyte");
    std::fs::rename(&labels, labels.with_extension("gz")).unwrap();
    assert_error(&source(), &Task::Classify, &["train-labels-idx1-ubyte.gz", "gunzip"]);
    std::fs::rename(labels.with_extension("gz"), directory.path("train-labels.idx1-ubyte")).unwrap();
    assert_eq!(training(&open(&source(), &Task::Classify).unwrap()), expected, "a dot in the name");
}

fn csv(directory: &Dir, text: &str, image: Option<ImageShape>) -> Data {
    directory.write("x.csv", text);
    let path = directory.path("x.csv").to_str().unwrap().to_owned();
    data(Source::Csv(Csv { path, image, largest: 16.0, label: None, header: Header::Auto }))
}

#[test]
fn csv_files() {
    let directory = Dir::new();
    let good = csv(&directory, "width,height,kind\n1,2.5,0\n\n -1e3 , 0 ,2\r\n", None);
    let dataset = open(&good, &Task::Classify).unwrap();
    assert_eq!(dataset.kind(), Kind::Features { width: 2, classes: 3 });
    assert_eq!(dataset.facts().item, Item::Samples);
    let mut expected = [(bits(&[1.0, 2.5]), 0), (bits(&[-1000.0, 0.0]), 2)];
    expected.sort_unstable();
    assert_eq!(training(&dataset), expected);

    let shape = ImageShape { height: 1, width: 2, channels: 1 };
    let dataset = open(&csv(&directory, "0,16,1\n8,4,0", Some(shape)), &Task::Classify).unwrap();
    assert_eq!(training(&dataset), [(vec![0, 255], 1), (vec![128, 64], 0)], "16 stands for white");

    let classify = Task::Classify;
    assert_error(&csv(&directory, "", None), &classify, &["no sample"]);
    assert_error(&csv(&directory, "a,b,c\n", None), &classify, &["no sample"]);
    assert_error(&csv(&directory, "1,2\n1,2,3\n", None), &classify, &["line 2 of", "3 columns: expected 2"]);
    assert_error(&csv(&directory, "1,x,3\n", None), &classify, &["line 1 of", "column 2 is `x`"]);
    assert_error(&csv(&directory, "1,nan,3\n", None), &classify, &["column 2 is `nan`"]);
    assert_error(&csv(&directory, "1,2,1.5\n", None), &classify, &["the class in column 3 is 1.5"]);
    assert_error(&csv(&directory, "1,2,-1\n", None), &classify, &["the class in column 3 is -1"]);
    assert_error(&csv(&directory, "7\n", None), &classify, &["1 column: expected at least 2"]);
    assert_error(&csv(&directory, "0,17,1\n", Some(shape)), &classify, &["column 2 is `17`: expected 0 to 16"]);
    assert_error(&csv(&directory, "0,1,2,1\n", Some(shape)), &classify, &["4 columns: expected 3"]);
    let deep = ImageShape { channels: 2, ..shape };
    assert_error(&csv(&directory, "0,1,2,1\n", Some(deep)), &classify, &["spec.engine.data.image: got 1x2x2"]);
}

#[test]
fn bad_lines_are_skipped_up_to_the_limit() {
    let directory = Dir::new();
    let data = csv(&directory, "1,2\nrubbish,x\n3,4\n\n5,6,7\n5,6\n", None);
    let open = |max_bad_samples| {
        let reader = switchyard_worker_contract::config::Reader { max_bad_samples, ..READER };
        switchyard_worker::data::Dataset::open(&data, &reader, &Task::Classify, 7)
    };
    let text = open(1).unwrap_err().to_string();
    assert!(
        text.starts_with("spec.engine.reader.maxBadSamples: 2 samples cannot be read, the last of them line 5 of"),
        "{text}"
    );
    let dataset = open(2).unwrap();
    assert_eq!((dataset.facts().train_samples, dataset.facts().bad_samples), (3, 2));
    assert_eq!(dataset.bad_samples().count(), 2, "they stay counted during the run");
}

/// Name, NumPy type string, shape and bytes.
type Array<'a> = (&'a str, &'a str, &'a [usize], &'a [u8]);

/// These arrays as `.npy` files, and as one safetensors file.
fn arrays(arrays: &[Array<'_>]) -> [(Dir, Data); 2] {
    let (directory, file) = (Dir::new(), Dir::new());
    let mut tensors = Vec::new();
    for (name, kind, shape, bytes) in arrays {
        directory.write(&format!("{name}.npy"), npy(kind, shape, bytes));
        let dtype = match *kind {
            "|u1" => Dtype::U8,
            "<i8" => Dtype::I64,
            "<f4" => Dtype::F32,
            "<f8" => Dtype::F64,
            kind => panic!("{kind}"),
        };
        tensors.push((*name, TensorView::new(dtype, shape.to_vec(), bytes).unwrap()));
    }
    file.write("x.safetensors", serialize(tensors, None).unwrap());
    let of_directory = data(Source::SafeTensors(directory.files()));
    let of_file = data(Source::SafeTensors(files(&file.path("x.safetensors"))));
    [(directory, of_directory), (file, of_file)]
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn longs(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn arrays_of_images_and_features() {
    let pixels: Vec<u8> = (0..24).collect();
    let labels = longs(&[1, 0]);
    for (_directory, data) in arrays(&[
        ("images", "|u1", &[2, 2, 2, 3], &pixels),
        ("labels", "<i8", &[2], &labels),
        ("validation_images", "|u1", &[1, 2, 2, 3], &pixels[..12]),
        ("validation_labels", "|u1", &[1], &[7]),
    ]) {
        let dataset = open(&data, &Task::Classify).unwrap();
        assert_eq!(dataset.kind(), Kind::Images { height: 2, width: 2, channels: 3, classes: 8 });
        assert_eq!(training(&dataset), [((0..12).collect(), 1), ((12..24).collect(), 0)]);
        assert_eq!(validation(&dataset).targets, [7]);
    }
    let values = floats(&[0.5, -1.0, 2.0, 3.0]);
    for (_directory, data) in arrays(&[("features", "<f4", &[2, 2], &values), ("labels", "|u1", &[2], &[3, 4])]) {
        let dataset = open(&data, &Task::Classify).unwrap();
        assert_eq!(dataset.kind(), Kind::Features { width: 2, classes: 5 });
        let mut expected = [(bits(&[0.5, -1.0]), 3), (bits(&[2.0, 3.0]), 4)];
        expected.sort_unstable();
        assert_eq!(training(&dataset), expected);
    }
}

#[test]
fn invalid_arrays() {
    let label = longs(&[1]);
    let too_large = longs(&[70_000]);
    let not_a_number = floats(&[1.0, f32::NAN]);
    let eight = [0_u8; 8];
    let cases: [(&[Array<'_>], &str); 9] = [
        (&[("images", "|u1", &[1, 2, 2], &[0; 4])], "no array `labels`"),
        (&[("labels", "<i8", &[1], &label)], "no array `images` or `features`"),
        (&[("images", "|u1", &[2, 2, 2], &eight), ("labels", "<i8", &[1], &label)], "as many samples as labels"),
        (&[("images", "|u1", &[1, 2, 2, 2], &eight), ("labels", "<i8", &[1], &label)], "[samples, height, width]"),
        (&[("images", "<f4", &[1, 2, 1], &eight), ("labels", "<i8", &[1], &label)], "bytes of shape"),
        (&[("features", "|u1", &[1, 8], &eight), ("labels", "<i8", &[1], &label)], "32-bit floats"),
        (&[("features", "<f4", &[1, 2], &not_a_number), ("labels", "<i8", &[1], &label)], "NaN in sample 0"),
        (&[("images", "|u1", &[1, 2, 4], &eight), ("labels", "<i8", &[1], &too_large)], "label 70000 of sample 0"),
        (&[("images", "|u1", &[1, 2, 4], &eight), ("labels", "<f8", &[1], &label)], "one of |u1, |i1"),
    ];
    for (arrays_of_case, words) in cases {
        for (_directory, data) in arrays(arrays_of_case) {
            assert_error(&data, &Task::Classify, &[words]);
        }
    }
    let directory = Dir::new();
    let assert_npy_error = |file: &[u8], words: &str| {
        directory.write("images.npy", file);
        assert_error(&data(Source::SafeTensors(directory.files())), &Task::Classify, &["images.npy", words]);
    };
    assert_npy_error(b"", "wrong first bytes");
    assert_npy_error(&npy("|u1", &[2, 2, 2], &[0; 8])[..9], "cut off");
    assert_npy_error(&npy("|u1", &[2, 2, 2], &[0; 8])[..40], "cut off");
    assert_npy_error(&npy("|u1", &[2, 2, 2], &[0; 7]), "an array of 7 bytes");
    assert_npy_error(&npy("|u1", &[usize::MAX, 2], &[0; 7]), "an array of 7 bytes");
    assert_npy_error(&npy(">i4", &[1], &[0; 4]), "numbers of type `>i4`");
    let columns = String::from_utf8_lossy(&npy("|u1", &[1], &[0])[10..]).replace("False", "True ");
    assert_npy_error(
        &[b"\x93NUMPY\x01\x00", &(columns.len() as u16 - 1).to_le_bytes()[..], columns.as_bytes()].concat(),
        "columns first",
    );
    directory.write("x.safetensors", "no tensors");
    assert_error(
        &data(Source::SafeTensors(files(&directory.path("x.safetensors")))),
        &Task::Classify,
        &["other than safetensors"],
    );
}

#[test]
fn duplicates_are_on_the_same_side_of_the_split() {
    // 200 samples, each of them twice.
    let pixels: Vec<u8> = (0..400_u32).flat_map(|sample| [(sample % 200) as u8, 5, 6, 7]).collect();
    let labels: Vec<u8> = (0..400).map(|sample| (sample % 3) as u8).collect();
    let [(_directory, mut data), _] =
        arrays(&[("images", "|u1", &[400, 2, 2], &pixels), ("labels", "|u1", &[400], &labels)]);
    data.validation_fraction = 0.2;
    let dataset = open(&data, &Task::Classify).unwrap();
    let facts = dataset.facts();
    assert_eq!(facts.train_samples + facts.validation_samples, 400);
    assert!((40..120).contains(&facts.validation_samples), "{facts:?}");
    let held = rows(&dataset, &validation(&dataset));
    assert!(training(&dataset).iter().all(|(pixels, _)| held.iter().all(|(other, _)| other != pixels)));
    data.validation_fraction = 0.3;
    assert_ne!(open(&data, &Task::Classify).unwrap().facts().digest, facts.digest, "the split is part of the digest");
    data.validation_fraction = 0.6;
    assert_error(&data, &Task::Classify, &["spec.engine.data.validationFraction: got 0.6"]);
}

#[test]
fn images_in_memory_are_scaled_and_normalised() {
    let directory = idx_directory();
    let mut data = data(Source::Idx(directory.files()));
    data.images.size = 4;
    let dataset = open(&data, &Task::Classify).unwrap();
    assert_eq!(dataset.kind(), Kind::Images { height: 4, width: 4, channels: 1, classes: 5 });
    assert_eq!(dataset.facts().sample, "4x4x1 pixels in 5 classes");
    data.images.size = 0;
    (data.images.mean, data.images.deviation) = (vec![0.5], vec![0.25]);
    let reader = switchyard_worker_contract::config::Reader {
        sample_type: switchyard_worker_contract::config::SampleType::Float32,
        ..READER
    };
    let bytes = open(&data, &Task::Classify).unwrap();
    let floats =
        std::sync::Arc::new(switchyard_worker::data::Dataset::open(&data, &reader, &Task::Classify, 7).unwrap());
    let (bytes, floats) = (validation(&bytes), validation(&floats));
    assert!(floats.pixels.is_empty() && bytes.values.is_empty());
    let expected: Vec<f32> = bytes.pixels.iter().map(|byte| (f32::from(*byte) / 255.0 - 0.5) / 0.25).collect();
    assert_eq!(floats.values, expected);
    data.images.size = 20_000;
    assert_error(&data, &Task::Classify, &["spec.engine.data.images.size: got 20000: expected at most 16384"]);
}

#[test]
fn data_that_does_not_match_the_model() {
    let directory = idx_directory();
    assert_error(
        &data(Source::Idx(directory.files())),
        &next_token(8, 256),
        &["IDX holds images", "Text, Tokens or Synthetic"],
    );
    assert_error(&data(Source::Text(directory.files())), &Task::Classify, &["Text holds tokens", "CIFAR10, IDX"]);
}

#[test]
fn too_few_samples_for_a_step() {
    let directory = idx_directory();
    let dataset = open(&data(Source::Idx(directory.files())), &Task::Classify).unwrap();
    let shape = switchyard_worker::data::StepShape { batch_size: 2, merge: 1, world: 2 };
    let text = switchyard_worker::data::Order::new(&dataset, shape, 1).unwrap_err().to_string();
    assert!(text.starts_with("spec.engine.data.path: 3 samples for training: one step needs 4"), "{text}");
    let text = "0123456789".repeat(7);
    let directory = Dir::new();
    directory.write("a.txt", text);
    let dataset = open(&data(Source::Text(directory.files())), &next_token(32, 256)).unwrap();
    let text = switchyard_worker::data::Order::new(&dataset, shape, 1).unwrap_err().to_string();
    assert!(text.contains("70 tokens for training: one step needs 129 (4 windows of 32 tokens)"), "{text}");
}
