//! The diagnosis as shown, selection and reading of log files, and the table in the documentation.

use super::*;
use std::io::Write;
use switchyard_tools::doctor::known;
use switchyard_worker_contract::recorder::{Entry, Operation, at};

fn quiet() -> Progress {
    Progress::new(false, Work { verb: "read", words: binary, total: 0, stride: STRIDE })
}

fn diagnosed(logs: &[(&str, &[u8])]) -> Diagnosis {
    let mut doctor = Doctor::new().unwrap();
    for (name, text) in logs {
        read(&mut doctor, name, 2026, *text, &mut quiet()).unwrap();
    }
    doctor.diagnosis()
}

/// After an intended change: `INSTA_UPDATE=always cargo test -p switchyard --lib`, then review the
/// diff.
#[test]
fn a_diagnosis_for_people() {
    let peer = b"2026-11-20T14:07:31.4Z [rank0]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting";
    let cause =
        b"2026-11-20T14:07:30Z [rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.";
    let remark = b"NCCL INFO Using network Socket";
    let diagnosis = diagnosed(&[
        ("logs/attempt-1/rank-0.log", b"No space left on device"),
        ("logs/attempt-2/rank-0.log", peer),
        ("logs/attempt-2/rank-1.log", cause),
        ("logs/attempt-2/rank-2.log", remark),
    ]);
    insta::assert_snapshot!("doctor_screen", screen(&diagnosis, None, &[], 100));
}

#[test]
fn logs_without_a_known_error_get_advice_on_what_to_send() {
    let text = screen(&diagnosed(&[("a.log", b"fine\n\xff\xfe broken\r\n")]), None, &[], 100);
    assert!(text.contains("no known error in these logs") && text.contains("NCCL_DEBUG=WARN"), "{text}");
    assert!(text.contains("1 log, 2 lines, 16 bytes; 1 line not UTF-8"), "{text}");
}

#[test]
fn overlong_lines_are_truncated_and_the_next_ones_read() {
    let mut text = vec![b'x'; LONGEST_LINE * 3];
    text.extend_from_slice(b" CUDA out of memory\nNo space left on device");
    let diagnosis = diagnosed(&[("a.log", &text)]);
    assert_eq!(diagnosis.read.lines, 2);
    assert_eq!(diagnosis.attempts[0].first.as_ref().map(|first| (first.error.id, first.line)), Some(("disk-full", 2)));
}

#[test]
fn folders_are_searched_for_possible_logs() {
    let folder = tempfile::tempdir().unwrap();
    let put = |path: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        File::create(path).unwrap().write_all(b"x").unwrap();
    };
    [
        "logs/attempt-1/rank-0.log",
        "events.jsonl",
        "status.yaml",
        "model.safetensors",
        "record/rank-0.steps.jsonl",
        ".hidden",
    ]
    .iter()
    .for_each(|path| put(path));
    std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
    let found = logs(&[folder.path().to_path_buf()]).unwrap();
    let names: Vec<String> =
        found.iter().map(|path| path.strip_prefix(folder.path()).unwrap().display().to_string()).collect();
    assert_eq!(names, ["events.jsonl", "logs/attempt-1/rank-0.log", "status.yaml"]);
    let missing = logs(&[folder.path().join("gone")]).unwrap_err().message;
    assert!(missing.contains("gone") && missing.contains("expected a log, or a folder with logs"), "{missing}");
    let empty = tempfile::tempdir().unwrap();
    assert!(logs(&[empty.path().to_path_buf()]).unwrap_err().message.contains("without any file that may be a log"));
}

#[test]
fn flight_recorders_show_the_last_operations_of_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let put = |rank: u32, entry: Entry, alive_us: u64| {
        let mut words = [0_u64; recorder::WORDS];
        let header = [
            (at::MAGIC, recorder::MAGIC),
            (at::RANK, rank.into()),
            (at::WORLD, 2),
            (at::ATTEMPT, 1),
            (at::PID, 4711),
            (at::ALIVE, alive_us),
            (at::COUNT, 1),
            (at::HOST, u64::from_ne_bytes(*b"node-b\0\0")),
        ];
        header.into_iter().for_each(|(at, word)| words[at] = word);
        words[recorder::RING_AT..recorder::RING_AT + recorder::ENTRY].copy_from_slice(&entry.pack());
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        std::fs::write(folder.path().join(recorder::file(rank, 1)), bytes).unwrap();
    };
    put(0, Entry { operation: Operation::Reduce, step: 17, index: 2, since_us: 1_100_000 }, 41_000_000);
    put(1, Entry { operation: Operation::Input, step: 17, index: 0, since_us: 1_000_000 }, 41_000_000);
    std::fs::write(folder.path().join("rank-9.attempt-1.recorder"), "cut").unwrap();
    let paths = [folder.path().to_path_buf()];
    assert_eq!(logs(&paths).unwrap(), Vec::<PathBuf>::new(), "recorders are no logs, and enough for a diagnosis");
    let stories = recorded(&paths).unwrap();
    let text = screen(&diagnosed(&[]), None, &stories, 100);
    for part in ["flight recorders of attempt 1", "rank 1 on node-b (process 4711)", "waiting for the reader", "40s"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let data = data(&diagnosed(&[]), None, &stories);
    assert!(data["recorders"][0]["text"].as_str().unwrap().contains("rank 0: step 17: waiting for the all-reduce"));
}

/// The rows of docs/troubleshooting.md, from the table of errors.
#[test]
fn the_document_has_every_error() {
    let row = |known: &switchyard_tools::doctor::KnownError| {
        let before = if known.told_by.is_empty() { "-" } else { known.told_by };
        format!("| `{}` | {} | {} | {} | {} |", known.id, known.says, known.role.word(), known.means, before)
    };
    let rows: Vec<String> = known().map(row).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/troubleshooting.md");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let (_, section) = text.split_once("### Known errors").unwrap_or_default();
    let shown: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(shown, rows, "docs/troubleshooting.md should have:\n{}", rows.join("\n"));
}
