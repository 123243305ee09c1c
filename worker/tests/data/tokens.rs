//! Text and token files: windows, masked tokens, changing files.

use crate::support::*;
use std::collections::BTreeMap;
use std::io::Write;
use switchyard_worker::data::{DataError, Kind, Masking, Task};
use switchyard_worker_contract::config::{Bert, Model, Source, TokenType};

fn encode(tokens: impl Iterator<Item = u32>, token_type: TokenType) -> Vec<u8> {
    match token_type {
        TokenType::UInt16 => tokens.flat_map(|token| (token as u16).to_le_bytes()).collect(),
        TokenType::UInt32 => tokens.flat_map(u32::to_le_bytes).collect(),
    }
}

/// A token sequence in which every token is its own position.
fn numbered(count: u32) -> impl Iterator<Item = u32> {
    0..count
}

#[test]
fn windows_of_token_files() {
    for (token_type, count) in [(TokenType::UInt16, 60_000), (TokenType::UInt32, 200_000)] {
        let directory = Dir::new();
        directory.write("train.bin", encode(numbered(count), token_type));
        for path in ["train.bin", ""] {
            let task = next_token(100, count);
            let dataset = open(&data(directory.tokens(path, token_type)), &task).unwrap();
            assert_eq!(dataset.kind(), Kind::Tokens { context: 100, vocabulary: count });
            assert_eq!((dataset.facts().train_items, dataset.facts().memory_bytes), (count.into(), 16));
            let mut prefetcher = start(&dataset, order(&dataset, 5, 1, 1), &READER);
            let mut starts = Vec::new();
            for batch in take(&mut prefetcher, 40) {
                for (tokens, targets) in batch.tokens.chunks(100).zip(batch.targets.chunks(100)) {
                    starts.push(tokens[0]);
                    assert!(tokens.iter().copied().eq(tokens[0]..tokens[0] + 100));
                    assert!(targets.iter().copied().eq(tokens[0] + 1..tokens[0] + 101));
                }
            }
            starts.sort_unstable();
            assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 100), "no window twice in an epoch");
        }
    }
}

#[test]
fn token_files_are_split_in_blocks() {
    let directory = Dir::new();
    directory.write("train.bin", encode(numbered(60_000), TokenType::UInt16));
    let mut data = data(directory.tokens("train.bin", TokenType::UInt16));
    data.validation_fraction = 0.2;
    let dataset = open(&data, &next_token(10, 60_000)).unwrap();
    let facts = dataset.facts();
    assert_eq!(facts.train_items + facts.validation_items, 60_000);
    assert!((4_000..25_000).contains(&facts.validation_items), "{facts:?}");
    let held: Vec<u32> = validation(&dataset).tokens;
    let samples = facts.train_samples as u32;
    let trained = start(&dataset, order(&dataset, samples, 1, 1), &READER).next().unwrap().tokens.clone();
    let held: std::collections::BTreeSet<u32> = held.into_iter().collect();
    assert!(trained.iter().all(|token| !held.contains(token)));
    // Windows span the gaps left by removed blocks.
    assert!(trained.chunks(10).any(|window| window[9] - window[0] > 9));
    // An explicit validation file replaces the split, and both files are digested.
    directory.write("val.bin", encode(numbered(50), TokenType::UInt16));
    data.source = directory.tokens("", TokenType::UInt16);
    let own = open(&data, &next_token(10, 60_000)).unwrap();
    assert_eq!((own.facts().train_items, own.facts().validation_items, own.facts().files), (60_000, 50, 2));
    assert_ne!(own.facts().digest, dataset.facts().digest);
}

#[test]
fn invalid_token_files() {
    let directory = Dir::new();
    let tokens = |name: &str| data(directory.tokens(name, TokenType::UInt32));
    let task = next_token(4, 100);
    assert_error(&tokens("gone.bin"), &task, &["nothing at", "gone.bin"]);
    assert_error(&tokens(""), &task, &["train.bin is missing"]);
    directory.write("x.bin", "");
    assert_error(&tokens("x.bin"), &task, &["x.bin: the file is empty"]);
    directory.write("x.bin", [1; 10]);
    assert_error(&tokens("x.bin"), &task, &["10 bytes", "a multiple of 4", "spec.engine.data.tokenType"]);
    directory.write("x.bin", encode([1, 2, 3, 100, 5].into_iter(), TokenType::UInt32));
    assert_error(&tokens("x.bin"), &task, &["token 100 at position 3", "below the vocabulary of 100"]);
    assert_error(&tokens("x.bin"), &next_token(0, 100), &["contextLength: got 0"]);
    let text = Dir::new();
    text.write("a.txt", "some text");
    assert_error(&data(Source::Text(text.files())), &next_token(2, 255), &["vocabulary: got 255", "256 for text"]);
}

#[test]
fn a_changing_token_file_is_an_error_not_a_crash() {
    type Change = fn(&std::path::Path);
    let changes: [(&str, Change); 3] = [
        ("5000 bytes, they were 120000", |path| {
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
        }),
        ("it was written to", |path| {
            // In place: a truncated file could be seen without its bytes.
            let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.write_all(&[2; 120_000]).unwrap();
            // The file system's clock may be too coarse to show the change.
            file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(9)).unwrap();
        }),
        ("0 bytes", |path| std::fs::write(path, "").unwrap()),
    ];
    for (words, change) in changes {
        let directory = Dir::new();
        directory.write("x.bin", vec![1; 120_000]);
        let dataset = open(&data(directory.tokens("x.bin", TokenType::UInt16)), &next_token(10, 2000)).unwrap();
        let mut prefetcher = start(&dataset, order(&dataset, 4, 1, 1), &READER);
        prefetcher.next().unwrap();
        change(&directory.path("x.bin"));
        let error = (0..5).find_map(|_| prefetcher.next().err()).unwrap();
        let text = error.to_string();
        assert!(matches!(error, DataError::Changed { .. }) && text.contains(words), "{words}: {text}");
        assert!(text.starts_with("spec.engine.data.path: ") && text.contains("x.bin has changed since the start"));
    }
    // A file that is replaced as a whole stays open unchanged.
    let directory = Dir::new();
    directory.write("x.bin", vec![1; 120_000]);
    directory.write("y.bin", vec![2; 120_000]);
    let dataset = open(&data(directory.tokens("x.bin", TokenType::UInt16)), &next_token(10, 2000)).unwrap();
    std::fs::rename(directory.path("y.bin"), directory.path("x.bin")).unwrap();
    let batch = start(&dataset, order(&dataset, 4, 1, 1), &READER).next().unwrap().clone();
    assert!(batch.tokens.iter().all(|token| *token == 0x0101));
}

#[test]
fn entropies() {
    let directory = Dir::new();
    directory.write("a.txt", "abab".repeat(100));
    let text = open(&data(Source::Text(directory.files())), &next_token(4, 256)).unwrap().entropies().unwrap().unwrap();
    assert!((text.unigram - 2.0_f64.ln()).abs() < 1e-12 && text.bigram.unwrap().abs() < 1e-12);
    directory.write("x.bin", encode((0..4000).map(|place| place % 2 * 30_000), TokenType::UInt16));
    let tokens = |vocabulary| {
        let data = data(directory.tokens("x.bin", TokenType::UInt16));
        open(&data, &next_token(4, vocabulary)).unwrap().entropies().unwrap()
    };
    let counted = tokens(50_000).unwrap();
    assert!((counted.unigram - 2.0_f64.ln()).abs() < 1e-12 && counted.bigram.is_none());
    assert_eq!(tokens(70_000), None);
}

fn bert(context_length: u32, next_sentence: bool) -> Masking {
    let bert = Bert {
        layers: 1,
        hidden_size: 8,
        heads: 1,
        context_length,
        vocabulary_size: 50_000,
        masked_fraction: 0.15,
        next_sentence,
    };
    let Task::Masked(masking) = Task::of(&Model::Bert(bert)) else { panic!("BERT masks tokens") };
    masking
}

/// Checks a sequence; returns the kind of replacement at each masked position (MASK, the token
/// itself, or another), and the tokens of the data.
fn check_sequence(masking: &Masking, tokens: &[u32], positions: &[u32], targets: &[u32]) -> (Vec<char>, Vec<u32>) {
    assert_eq!((positions.len(), targets.len()), (masking.predictions as usize, masking.predictions as usize));
    assert!(positions.windows(2).all(|pair| pair[0] < pair[1]), "ascending, none twice: {positions:?}");
    let mut restored = tokens.to_vec();
    let mut kinds = Vec::new();
    for (position, target) in positions.iter().zip(targets) {
        let token = std::mem::replace(&mut restored[*position as usize], *target);
        assert!(token < masking.vocabulary || token == masking.mask);
        kinds.push(if token == masking.mask {
            'm'
        } else if token == *target {
            's'
        } else {
            'o'
        });
    }
    assert_eq!((restored[0], restored[tokens.len() - 1]), (masking.cls, masking.sep));
    let special: Vec<usize> = (0..tokens.len()).filter(|place| restored[*place] >= masking.vocabulary).collect();
    assert_eq!(special.len(), if masking.next_sentence { 3 } else { 2 }, "only the special tokens are never masked");
    (kinds, restored)
}

#[test]
fn masked_tokens() {
    let directory = Dir::new();
    directory.write("x.bin", encode(numbered(40_000), TokenType::UInt16));
    let data = data(directory.tokens("x.bin", TokenType::UInt16));
    for next_sentence in [false, true] {
        let masking = bert(64, next_sentence);
        assert_eq!(masking.predictions, 10);
        let dataset = open(&data, &Task::Masked(masking)).unwrap();
        let mut prefetcher = start(&dataset, order(&dataset, 20, 1, 1), &READER);
        let (mut counts, mut following, mut places) = (BTreeMap::new(), 0, BTreeMap::new());
        for batch in take(&mut prefetcher, 100) {
            assert_eq!((batch.tokens.len(), batch.segments.len()), (20 * 64, 20 * 64));
            assert_eq!(batch.next_sentence.len(), if next_sentence { 20 } else { 0 });
            for sample in 0..20 {
                let piece = |all: &[u32], each: usize| all[sample * each..][..each].to_vec();
                let positions: Vec<u32> =
                    piece(&batch.positions, 10).iter().map(|position| position - sample as u32 * 64).collect();
                let (kinds, restored) =
                    check_sequence(&masking, &piece(&batch.tokens, 64), &positions, &piece(&batch.targets, 10));
                kinds.into_iter().for_each(|kind| *counts.entry(kind).or_insert(0) += 1);
                positions.iter().for_each(|position| *places.entry(*position).or_insert(0) += 1);
                let segments = &batch.segments[sample * 64..][..64];
                if next_sentence {
                    // CLS, 31 tokens, SEP; 30 tokens, SEP.
                    assert_eq!(restored[32], masking.sep);
                    assert!(segments[..33].iter().all(|s| *s == 0) && segments[33..].iter().all(|s| *s == 1));
                    assert!(restored[1..32].iter().copied().eq(restored[1]..restored[1] + 31));
                    assert!(restored[33..63].iter().copied().eq(restored[33]..restored[33] + 30));
                    let follows = restored[33] == restored[31] + 1;
                    assert_eq!(batch.next_sentence[sample], u32::from(follows));
                    following += u32::from(follows);
                } else {
                    assert!(restored[1..63].iter().copied().eq(restored[1]..restored[1] + 62));
                    assert!(segments.iter().all(|segment| *segment == 0));
                }
            }
        }
        // 20,000 masked tokens: 80 % MASK, 10 % random token, 10 % unchanged.
        let share = |kind| f64::from(counts[&kind]) / 20_000.0;
        assert!((share('m') - 0.8).abs() < 0.01, "{counts:?}");
        assert!((share('o') - 0.1).abs() < 0.01 && (share('s') - 0.1).abs() < 0.01, "{counts:?}");
        assert!(!next_sentence || (900..1100).contains(&following), "{following} of 2000");
        // Every position except the special ones, about equally often.
        assert_eq!(places.len() as u32, masking.window());
        assert!(places.values().all(|count| (230..430).contains(count)), "{places:?}");
    }
}

#[test]
fn masks_differ_between_epochs_and_stay_the_same_in_evaluations() {
    let directory = Dir::new();
    directory.write("x.bin", encode(numbered(2_000), TokenType::UInt16));
    let mut data = data(directory.tokens("x.bin", TokenType::UInt16));
    data.validation_fraction = 0.3;
    let dataset = open(&data, &Task::Masked(bert(32, true))).unwrap();
    assert_eq!(validation(&dataset), validation(&dataset));
    let order = order(&dataset, dataset.facts().train_samples as u32, 1, 1);
    let epochs = take(&mut start(&dataset, order, &READER), 2);
    let hidden = |epoch: usize| epochs[epoch].targets.iter().copied().collect::<std::collections::BTreeSet<_>>();
    assert_ne!(hidden(0), hidden(1));
}

#[test]
fn sequences_too_short_for_their_special_tokens() {
    let directory = Dir::new();
    directory.write("x.bin", encode(numbered(500), TokenType::UInt16));
    let data = data(directory.tokens("x.bin", TokenType::UInt16));
    for (context, next_sentence) in [(0, false), (2, false), (3, true), (4, true)] {
        let task = Task::Masked(bert(context, next_sentence));
        assert_error(&data, &task, &["spec.engine.model.bert.contextLength", "room for the special tokens"]);
    }
    assert!(open(&data, &Task::Masked(bert(5, true))).is_ok() && open(&data, &Task::Masked(bert(3, false))).is_ok());
}
