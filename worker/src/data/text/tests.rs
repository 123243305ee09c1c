use super::*;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

const LIMIT: u64 = 4 << 30;

fn digest(corpus: &Corpus) -> String {
    let mut hash = Xxh3::new();
    corpus.digest(&mut hash);
    format!("{:032x}", hash.digest128())
}

/// A directory with these files.
fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (path, text) in files {
        let path = directory.path().join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
    directory
}

fn data(path: &Path) -> Files {
    Files { path: path.to_str().expect("a path").to_owned(), include: vec![], exclude: vec![] }
}

fn patterns(path: &Path, include: &[&str], exclude: &[&str]) -> Files {
    let owned = |patterns: &[&str]| patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
    Files { include: owned(include), exclude: owned(exclude), ..data(path) }
}

fn text(data: &Files) -> String {
    String::from_utf8(Corpus::load(data, 0.0, 2, LIMIT).expect("a corpus").train).expect("text")
}

/// The error and its message.
fn error(data: &Files) -> (DataError, String) {
    split_error(data, 0.0)
}

fn split_error(data: &Files, fraction: f64) -> (DataError, String) {
    let error = Corpus::load(data, fraction, 5, LIMIT).expect_err("an error");
    let text = error.to_string();
    assert!(text.starts_with("spec.engine."), "{text}");
    assert!(text.contains("expected"), "{text}");
    assert!(!text.ends_with('.'), "{text}");
    (error, text)
}

#[test]
fn a_single_file() {
    let directory = tree(&[(".hidden", "to be or not")]);
    let corpus =
        Corpus::load(&data(&directory.path().join(".hidden")), 0.0, 5, LIMIT).expect("the path itself may be hidden");
    assert_eq!(corpus.train, b"to be or not");
    assert_eq!((corpus.files, corpus.skipped.by_reason()), (1, vec![]));
    assert!(corpus.validation.is_empty());
}

#[test]
fn a_directory_in_the_order_of_its_paths() {
    let directory = tree(&[("b.txt", "B"), ("a/z.txt", "Z"), ("a.txt", "A"), ("a/y/x.txt", "X"), ("empty.txt", "")]);
    let corpus = Corpus::load(&data(directory.path()), 0.0, 2, LIMIT).expect("a corpus");
    // `a.txt` sorts before `a/…` because `.` sorts before `/`.
    assert_eq!(corpus.train, b"AXZB");
    assert_eq!((corpus.files, corpus.skipped.by_reason()[0].files), (4, 1));
}

#[test]
fn hidden_and_cache_directories_are_left_out() {
    let tag = "Signature: 8a477f597d28d172789f06886806bc55\n# made by a tool\n";
    let directory = tree(&[
        ("a.txt", "A"),
        (".git/config", "G"),
        (".env", "E"),
        ("target/CACHEDIR.TAG", tag),
        ("target/b.txt", "T"),
        ("other/CACHEDIR.TAG", "no signature"),
        ("other/c.txt", "C"),
    ]);
    let files = patterns(directory.path(), &["**/*.txt", ".*"], &[]);
    assert_eq!(text(&files), "AC");
    // A cache directory is read if the path names it.
    assert_eq!(text(&patterns(&directory.path().join("target"), &["*.txt"], &[])), "T");
}

#[test]
fn include_and_exclude() {
    let directory = tree(&[
        ("main.rs", "M"),
        ("src/lib.rs", "L"),
        ("src/deep/x.rs", "X"),
        ("src/notes.md", "N"),
        ("vendor/v.rs", "V"),
    ]);
    let chosen = |include: &[&str], exclude: &[&str]| text(&patterns(directory.path(), include, exclude));
    assert_eq!(chosen(&["**/*.rs"], &[]), "MXLV");
    assert_eq!(chosen(&["*.rs"], &[]), "M", "a star stays within a directory");
    assert_eq!(chosen(&["./src/*.{rs,md}"], &[]), "LN");
    assert_eq!(chosen(&["**/*.rs"], &["vendor/**", "**/deep/**"]), "ML");
    assert_eq!(chosen(&[], &["**/*.rs"]), "N");
}

#[test]
fn links() {
    let directory = tree(&[("a.txt", "A"), ("sub/b.txt", "B")]);
    let path = |name: &str| directory.path().join(name);
    symlink(path("a.txt"), path("c.txt")).expect("a link");
    symlink(path("sub"), path("loop")).expect("a link");
    symlink(directory.path(), path("sub/up")).expect("a link");
    assert_eq!(text(&data(directory.path())), "AAB");
    // The path itself may be a link to a directory.
    assert_eq!(text(&data(&path("loop"))), "B");
    symlink(path("nothing"), path("d.txt")).expect("a link");
    let (_, message) = error(&data(directory.path()));
    assert!(message.contains("d.txt is a link to nothing"), "{message}");
    assert_eq!(text(&patterns(directory.path(), &[], &["d.txt"])), "AAB");
}

#[test]
fn missing_path() {
    let directory = tree(&[]);
    let (found, message) = error(&data(&directory.path().join("nowhere")));
    assert!(matches!(found, DataError::Missing { .. }) && message.contains("nowhere"), "{message}");
    let (found, message) = error(&Files { path: "no/such/relative".to_owned(), ..data(directory.path()) });
    assert!(matches!(found, DataError::Missing { .. }));
    assert!(message.contains(": nothing at /"), "a relative path is shown as what it leads to: {message}");
}

#[test]
fn devices_pipes_and_sockets() {
    let (_, message) = error(&data(Path::new("/dev/null")));
    assert!(message.contains("/dev/null is a character device: expected a file or a directory"), "{message}");

    let directory = tree(&[("a.txt", "A")]);
    let pipe = directory.path().join("pipe.txt");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
    let (_, message) = error(&data(&pipe));
    assert!(message.contains("pipe.txt is a pipe"), "{message}");
    let (_, message) = error(&patterns(directory.path(), &["*.txt"], &[]));
    assert!(message.starts_with("spec.engine.data.include:") && message.contains("exclude it"), "{message}");
    assert_eq!(text(&patterns(directory.path(), &[], &["pipe.*"])), "A");

    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let (_, message) = error(&data(&socket));
    assert!(message.contains("is a socket"), "{message}");
}

#[test]
fn nothing_to_read() {
    let directory = tree(&[("a.txt", ""), ("b.txt", "")]);
    let (found, message) = error(&data(directory.path()));
    assert!(matches!(found, DataError::AllEmpty { files: 2, .. }), "{message}");
    let (found, message) = error(&patterns(directory.path(), &["*.rs", "*.md"], &["b*"]));
    assert!(matches!(found, DataError::NothingMatches { seen: 2, .. }), "{message}");
    assert!(message.contains("`*.rs`, `*.md`") && message.contains("`b*`"), "{message}");
    let empty = tree(&[]);
    let (found, _) = error(&data(empty.path()));
    assert!(matches!(found, DataError::NothingMatches { seen: 0, .. }));
}

#[test]
fn wrong_patterns() {
    let directory = tree(&[("a.txt", "A")]);
    for (pattern, reason) in [
        ("src/[a-", "unclosed character class"),
        ("{a,b", "unclosed alternate group"),
        ("", "is empty"),
        ("/etc/*", "leads out of the directory"),
        ("../*.txt", "leads out of the directory"),
    ] {
        let (_, message) = error(&patterns(directory.path(), &["*", pattern], &[]));
        assert!(message.starts_with("spec.engine.data.include[1]: pattern"), "{message}");
        assert!(message.contains(reason), "{message}");
        let (_, message) = error(&patterns(directory.path(), &[], &[pattern]));
        assert!(message.starts_with("spec.engine.data.exclude[0]"), "{message}");
    }
    let (found, _) = error(&patterns(&directory.path().join("a.txt"), &["*"], &[]));
    assert!(matches!(found, DataError::PatternsForFile { .. }));
}

#[test]
fn too_short_for_both_sides() {
    let directory = tree(&[("a.txt", "some text")]);
    let (found, message) = split_error(&data(directory.path()), 0.1);
    assert!(matches!(found, DataError::NoRoomForValidation { got: 9, .. }), "{message}");
}

/// Runs `work` on a thread without capabilities, so that file modes apply even to root.
fn without_capabilities(work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut sets = capabilities(None).expect("capabilities");
            sets.effective.remove(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH);
            set_capabilities(None, sets).expect("a thread may give up what it may do");
            work();
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn unreadable_files() {
    without_capabilities(unreadable);
}

fn unreadable() {
    let directory = tree(&[("a.txt", "A"), ("secret.txt", "S"), ("closed/c.txt", "C")]);
    let close = |name: &str| {
        let path = directory.path().join(name);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("own file");
    };
    close("secret.txt");
    let (found, message) = error(&data(directory.path()));
    assert!(matches!(found, DataError::Unreadable { kind: "file", .. }) && message.contains("secret.txt"), "{message}");
    close("closed");
    let (found, message) = error(&data(directory.path()));
    assert!(matches!(found, DataError::Unreadable { .. }) && message.contains("closed"), "{message}");
    assert_eq!(text(&patterns(directory.path(), &[], &["secret.txt", "closed/**"])), "A");
    fs::set_permissions(directory.path().join("closed"), fs::Permissions::from_mode(0o700)).expect("own directory");
}

#[test]
fn too_large() {
    let directory = tree(&[("a.txt", "12345"), ("b.txt", "67890")]);
    assert!(Corpus::load(&data(directory.path()), 0.0, 2, 10).is_ok());
    let error = Corpus::load(&data(directory.path()), 0.0, 2, 9).expect_err("one byte less");
    assert!(matches!(error, DataError::TooLarge { got: 10, limit: 9, .. }), "{error}");
    // A sparse 5 GiB file without a single block on disk: rejected before any of it is read.
    let sparse = directory.path().join("sparse.txt");
    fs::File::create(&sparse).and_then(|file| file.set_len(5 << 30)).expect("a sparse file");
    assert!(matches!(Corpus::load(&data(directory.path()), 0.0, 2, LIMIT), Err(DataError::TooLarge { .. })));
}

#[test]
fn digests() {
    let lines: String = (0..3000).map(|line| format!("line {line}\n")).collect();
    let load = |files: &[(&str, &str)], fraction: f64| {
        let directory = tree(files);
        Corpus::load(&data(directory.path()), fraction, 17, LIMIT).expect("a corpus")
    };
    let corpus = load(&[("a", &lines), ("b", "more")], 0.1);
    assert_eq!(digest(&corpus), digest(&load(&[("x", &lines), ("y", "more")], 0.1)), "names do not count");
    assert_eq!(digest(&corpus).len(), 32);
    assert_ne!(digest(&corpus), digest(&load(&[("a", &lines), ("b", "mope")], 0.1)));
    assert_ne!(digest(&corpus), digest(&load(&[("a", &lines), ("b", "more")], 0.3)), "the split counts");
    assert!(!corpus.validation.is_empty());
    let all = [corpus.train, corpus.validation].concat();
    assert_eq!(all.len(), lines.len() + 4);
}

#[test]
fn compressed_text_is_refused_by_name() {
    for (name, unpack) in [("a.txt.gz", "gunzip"), ("a.ZST", "unzstd"), ("a.bz2", "bunzip2"), ("a.xz", "unxz")] {
        let directory = tree(&[("b.txt", "to be"), (name, "or not")]);
        let (_, text) = error(&data(directory.path()));
        assert!(text.contains(&format!("{name}: compressed (")) && text.contains(unpack), "{text}");
        let without = patterns(directory.path(), &[], &[name]);
        assert_eq!(Corpus::load(&without, 0.0, 2, LIMIT).expect("a corpus").train, b"to be");
    }
    // The name can hide it.
    let directory = tree(&[("a.txt", "")]);
    fs::write(directory.path().join("a.txt"), [0x1f, 0x8b, 8, 0]).expect("a file");
    assert!(error(&data(directory.path())).1.contains("a.txt: compressed (gz)"));
}
