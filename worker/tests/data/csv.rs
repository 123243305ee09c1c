//! CSV files as spreadsheets, pandas and data set hubs write them.

use crate::support::*;
use std::fmt::Write;
use switchyard_worker::data::{Kind, Task};
use switchyard_worker_contract::config::{Column, Csv, Data, Features, Header, ImageShape, Source};

fn csv(directory: &Dir, text: impl AsRef<[u8]>) -> Csv {
    directory.write("x.csv", text);
    let path = directory.path("x.csv").to_str().unwrap().to_owned();
    Csv { path, image: None, largest: 255.0, label: None, header: Header::Auto }
}

fn of(csv: &Csv) -> Data {
    data(Source::Csv(csv.clone()))
}

/// The classes of the samples, in order of the first feature.
fn classes(csv: &Csv) -> Vec<u32> {
    let mut samples = training(&open(&of(csv), &Task::Classify).unwrap());
    samples.sort_by(|(a, _), (b, _)| f32::from_bits(a[0]).total_cmp(&f32::from_bits(b[0])));
    samples.into_iter().map(|(_, class)| class).collect()
}

fn assert_csv_error(csv: &Csv, words: &[&str]) {
    assert_error(&of(csv), &Task::Classify, words);
}

/// Ten classes with 64 pixels each, the last of them always black, as in MNIST.
fn pixels(header: impl Fn(usize) -> String) -> String {
    let mut text = (0..65).map(header).collect::<Vec<_>>().join(",");
    for sample in 0..40 {
        write!(text, "\n{}", sample % 10).unwrap();
        (0..63).for_each(|pixel| write!(text, ",{}", (sample * 37 + pixel * 11) % 256).unwrap());
        text.push_str(",0");
    }
    text
}

const IMAGE: Option<ImageShape> = Some(ImageShape { height: 8, width: 8, channels: 1 });

/// Reproduction R4 of issue 39: the last pixel was the class, and training had nothing to learn.
#[test]
fn a_label_in_the_first_column_is_found_by_its_name() {
    let directory = Dir::new();
    let name = |column| if column == 0 { "Label".to_owned() } else { format!("p{column}") };
    let csv = Csv { image: IMAGE, ..csv(&directory, pixels(name)) };
    let dataset = open(&of(&csv), &Task::Classify).unwrap();
    assert_eq!(dataset.kind(), Kind::Images { height: 8, width: 8, channels: 1, classes: 10 });
    let (first, class) = &training(&dataset)[0];
    assert_eq!((first[0], first[63], *class), (0, 0, 0), "the first pixel, not the label");
}

/// The second file of reproduction R4: a header of numbers was a sample with class 64.
#[test]
fn numbered_columns_are_a_header_and_a_constant_label_is_refused() {
    let directory = Dir::new();
    let csv = Csv { image: IMAGE, ..csv(&directory, pixels(|column| column.to_string())) };
    let words = ["labelColumn: got column 65 (`64`), which is 0 in all 40 samples", "1 is the first, -1 the last"];
    assert_csv_error(&csv, &words);
    let csv = Csv { label: Some(Column::Position(1)), ..csv };
    assert_eq!(open(&of(&csv), &Task::Classify).unwrap().facts().train_samples, 40);
    let absent = Csv { header: Header::Absent, ..csv };
    assert_eq!(open(&of(&absent), &Task::Classify).unwrap().facts().train_samples, 41);
}

#[test]
fn the_label_is_a_column_by_name_or_position() {
    let directory = Dir::new();
    let named = csv(&directory, "a,kind,b\n1,0,5\n2,1,6\n3,1,7");
    let label = |label| Csv { label: Some(label), ..named.clone() };
    for column in [Column::Name("kind".to_owned()), Column::Position(2), Column::Position(-2)] {
        assert_eq!(classes(&label(column)), [0, 1, 1]);
    }
    assert_csv_error(&label(Column::Name("Kind".to_owned())), &["got `Kind`: expected one of `a`, `kind`, `b`"]);
    for position in [0, 4, -4, i32::MIN] {
        assert_csv_error(&label(Column::Position(position)), &["labelColumn: got", "a column from 1 to 3"]);
    }
    let bare = csv(&directory, "1,0,5\n2,1,6");
    let by_name = Csv { label: Some(Column::Name("kind".to_owned())), ..bare.clone() };
    assert_csv_error(&by_name, &["the file has no header"]);
    let present = Csv { header: Header::Present, label: Some(Column::Position(2)), ..bare };
    directory.write("x.csv", "1,0,5\n2,1,6\n3,0,7");
    assert_eq!(classes(&present), [1, 0], "the first line is a header");
}

#[test]
fn the_usual_names_count_at_either_end_only() {
    let directory = Dir::new();
    for header in ["class,a,b", "TARGET,a,b", "\"y\",\"a\",\"b\"", "label,1,2"] {
        assert_eq!(classes(&csv(&directory, format!("{header}\n1,1,5\n0,2,6"))), [1, 0], "{header}");
    }
    // Coordinates.
    assert_eq!(classes(&csv(&directory, "x,y,kind\n1,5,1\n2,6,0")), [1, 0]);
}

#[test]
fn a_column_of_measurements_is_not_taken_for_the_class() {
    let directory = Dir::new();
    let lines: String = (0..50).map(|line| format!("{},{}\n", line % 2, line * 5)).collect();
    let measured = csv(&directory, lines);
    assert_csv_error(&measured, &["the last, column 2, has numbers up to 245, like pixels", "by name or position"]);
    let declared = |position| Csv { label: Some(Column::Position(position)), ..measured.clone() };
    assert_eq!(open(&of(&declared(1)), &Task::Classify).unwrap().kind(), Kind::Features { width: 1, classes: 2 });
    assert_eq!(open(&of(&declared(2)), &Task::Classify).unwrap().kind(), Kind::Features { width: 1, classes: 246 });
    assert_csv_error(
        &csv(&directory, "1,2.5\n"),
        &["the class in column 2 is 2.5", "another spec.engine.data.labelColumn"],
    );
}

/// As pandas' `astype("category")` and scikit-learn's `LabelEncoder` number them.
#[test]
fn texts_are_classes_in_the_order_of_their_bytes() {
    let directory = Dir::new();
    let names = ["7", "Iris-setosa", "cat, or \"dog\"", "\u{fc}ber"];
    let lines = "1,\u{fc}ber\n2,Iris-setosa\n3,\"cat, or \"\"dog\"\"\"\n4, 7 \n5,\u{fc}ber\n";
    for header in ["", "size,kind\n", "x,class\n"] {
        let file = csv(&directory, format!("{header}{lines}"));
        assert_eq!(classes(&file), [3, 1, 2, 0, 3], "{header}");
        let dataset = open(&of(&file), &Task::Classify).unwrap();
        assert_eq!(dataset.kind(), Kind::Features { width: 1, classes: 4 });
        assert_eq!(dataset.class_names(), names);
    }
    let numbered = open(&of(&csv(&directory, "1,0\n2,1\n")), &Task::Classify).unwrap();
    assert!(numbered.class_names().is_empty());
    let digest = |text: &str| open(&of(&csv(&directory, text)), &Task::Classify).unwrap().facts().digest.clone();
    assert_ne!(digest("1,a\n2,b\n"), digest("1,a\n2,c\n"), "ranks and checkpoints compare the digest");
    let first = Csv { label: Some(Column::Position(1)), ..csv(&directory, "M,17.9\nB,13.5\nM,20.5") };
    let mut samples = training(&open(&of(&first), &Task::Classify).unwrap());
    samples.sort_unstable();
    assert_eq!(samples.iter().map(|(_, class)| *class).collect::<Vec<_>>(), [0, 1, 1]);
}

#[test]
fn bad_texts_in_the_label_column_are_named() {
    let directory = Dir::new();
    let bad = |text: &[u8], words: &[&str]| assert_csv_error(&csv(&directory, text), words);
    bad(b"1,a\n2,\n3,b", &["line 2 of", "the class in column 2 is nothing", "a class name"]);
    bad(b"1,a\n2,\xff\n3,b", &["line 2 of", "bytes of UTF-8"]);
    bad(format!("1,a\n2,{}", "b".repeat(201)).as_bytes(), &["line 2 of", "a class name with 1 to 200 bytes"]);
    bad(b"1,0\n2,cat\n3,1", &["line 2 of", "the class in column 2 is cat: expected a whole number"]);
    bad(b"1,cat\n2,cat\n", &["which is `cat` in all 2 samples"]);
    bad(b"cat,1,0\ndog,2,1\n", &["column 1 is `cat`", "labelColumn: 1 if this column is the class"]);
    bad(b"1,\"a\n2,b", &["line 1 of", "the class in column 2 is \"a", "with both quotes"]);
    bad(b"1,0\n\"2,1", &["line 2 of", "column 1 is `\"2,1`: expected a number"]);
    let names: String = (0..101).map(|line| format!("{line},id-{line}\n")).collect();
    bad(names.as_bytes(), &["the last, column 2, has 101 different texts, like identifiers"]);
    let declared = Csv { label: Some(Column::Position(2)), ..csv(&directory, names) };
    assert_eq!(open(&of(&declared), &Task::Classify).unwrap().class_names().len(), 101);
}

#[test]
fn byte_order_marks_and_compressed_files() {
    let directory = Dir::new();
    for text in ["\u{feff}a,b,kind\n1,2,0\n2,3,1", "\u{feff}1,2,0\n2,3,1", "\u{feff}label,a\r\n0,1\r\n1,2\r\n"] {
        assert_eq!(classes(&csv(&directory, text)), [0, 1], "{text}");
    }
    assert_csv_error(&csv(&directory, b"\xff\xfea\0,\0"), &["text in UTF-16: expected UTF-8"]);
    assert_csv_error(&csv(&directory, b"\x1f\x8b\x08\0\0"), &["compressed (gz)", "gunzip"]);
    assert_csv_error(&csv(&directory, "1,1e39,0\n"), &["column 2 is `1e39`: expected at most 3.4e38"]);
}

#[test]
fn features_are_normalised_by_the_training_split() {
    let directory = Dir::new();
    let lines: String = (0..200).map(|line| format!("{},{},{}\n", 1e6 + f64::from(line), -3, line % 2)).collect();
    let mut data = of(&csv(&directory, lines));
    let raw = open(&data, &Task::Classify).unwrap();
    (data.validation_fraction, data.features) = (0.25, Features::TrainingSplit);
    let dataset = open(&data, &Task::Classify).unwrap();
    assert_ne!(raw.facts().digest, dataset.facts().digest, "ranks and checkpoints compare the digest");
    let column = |index: usize| -> Vec<f64> {
        training(&dataset).iter().map(|(row, _)| f64::from(f32::from_bits(row[index]))).collect()
    };
    let values = column(0);
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    assert!(mean.abs() < 1e-5 && (variance - 1.0).abs() < 1e-5, "mean {mean}, variance {variance}");
    assert!(column(1).iter().all(|value| *value == 0.0), "a feature that does not vary");
    let held = validation(&dataset);
    assert!(held.values.iter().all(|value| value.abs() < 3.0), "validation is normalised too");
}
