use super::*;
use std::fs;
use tempfile::TempDir;

/// A machine with folders for every rule, and a Python in a virtual environment.
fn machine() -> (TempDir, impl Fn(&str) -> Option<OsString>) {
    let root = tempfile::tempdir().unwrap();
    for folder in ["first", "second", "usr/local/cuda/lib64", "venv/bin", "python/bin"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    for package in ["cu13", "cudnn"] {
        for site in ["venv/lib/python3.12/site-packages", "python/lib/python3.12/dist-packages"] {
            fs::create_dir_all(root.path().join(site).join("nvidia").join(package).join("lib")).unwrap();
        }
    }
    fs::write(root.path().join("python/bin/python3"), "").unwrap();
    std::os::unix::fs::symlink(root.path().join("python/bin/python3"), root.path().join("venv/bin/python3")).unwrap();
    let path = root.path().to_path_buf();
    let get = move |name: &str| match name {
        VARIABLE => Some(std::env::join_paths([path.join("first"), path.join("second")]).unwrap()),
        "VIRTUAL_ENV" => Some(path.join("venv").into_os_string()),
        "PATH" => Some(path.join("python/bin").into_os_string()),
        _ => None,
    };
    (root, get)
}

/// A library that no machine has.
const MADE_UP: Wanted = Wanted {
    name: "nothing",
    files: &["libswitchyard-nothing.so.2", "libswitchyard-nothing.so"],
    own_files: Some("libswitchyard-nothing-own.so."),
    is_of_driver: false,
};

#[test]
fn the_order_is_variable_loader_toolkit_python() {
    let (root, get) = machine();
    let places = Places::new(get, root.path(), None);
    let candidates = places.candidates(&MADE_UP);
    let shown: Vec<String> = candidates
        .iter()
        .filter(|(_, path)| path.to_string_lossy().ends_with(".2"))
        .map(|(_, path)| path.strip_prefix(root.path()).unwrap_or(path).display().to_string())
        .collect();
    let wanted = [
        "first/libswitchyard-nothing.so.2",
        "second/libswitchyard-nothing.so.2",
        "libswitchyard-nothing.so.2",
        "usr/local/cuda/lib64/libswitchyard-nothing.so.2",
        "usr/local/cuda/lib/libswitchyard-nothing.so.2",
        "usr/local/cuda/compat/libswitchyard-nothing.so.2",
        "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libswitchyard-nothing.so.2",
        "venv/lib/python3.12/site-packages/nvidia/cudnn/lib/libswitchyard-nothing.so.2",
        "python/lib/python3.12/dist-packages/nvidia/cu13/lib/libswitchyard-nothing.so.2",
        "python/lib/python3.12/dist-packages/nvidia/cudnn/lib/libswitchyard-nothing.so.2",
    ];
    assert_eq!(shown, wanted);
    let origins: Vec<Origin> = candidates.iter().map(|(origin, _)| *origin).collect();
    assert!(origins.is_sorted_by_key(|origin| *origin as u8) && origins.contains(&Origin::Python), "{origins:?}");
}

#[test]
fn what_comes_with_the_driver_is_searched_where_a_runtime_puts_it() {
    let (root, get) = machine();
    let of_driver = Wanted { is_of_driver: true, ..MADE_UP };
    let folder = root.path().join("usr/lib64");
    fs::create_dir_all(&folder).unwrap();
    let library = folder.join("libswitchyard-nothing.so.2");
    any_library(&library);
    let places = Places::new(get, root.path(), None);
    let found = places.open(&of_driver).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!((found.origin, found.library.path), (Origin::Driver, library));
    assert!(places.open(&MADE_UP).is_err(), "libraries of a toolkit are not there");
}

#[test]
fn a_named_python_replaces_the_others() {
    let (root, get) = machine();
    let places = Places::new(get, root.path(), Some(&root.path().join("python/bin/python3")));
    assert!(places.python.iter().all(|folder| folder.starts_with(root.path().join("python"))), "{:?}", places.python);
    assert_eq!(places.python.len(), 2);
}

#[test]
fn what_is_nowhere_is_absent_with_all_places() {
    let (root, get) = machine();
    let places = Places::new(get, root.path(), None);
    let Err(Error::NotFound { library, tried }) = places.open(&MADE_UP).map(|_| ()) else { panic!("found") };
    assert_eq!(library, MADE_UP.name);
    assert_eq!(tried.len(), places.candidates(&MADE_UP).len());
}

/// A library that can be opened.
fn any_library(to: &Path) {
    let real = mapped("libc.so").unwrap();
    fs::copy(real, to).unwrap();
}

/// A file in this process's memory, by a part of its path.
fn mapped(part: &str) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    files.find(|file| file.contains(part)).map(str::to_owned)
}

#[test]
fn a_library_has_the_files_opened_that_it_will_ask_for_by_name() {
    let (root, get) = machine();
    let [library, own, other] = ["libswitchyard-nothing.so.2", "libswitchyard-nothing-own.so.7", "libother.so.7"]
        .map(|file| root.path().join("first").join(file));
    for file in [&library, &own, &other] {
        any_library(file);
    }
    let found = Places::new(get, root.path(), None).open(&MADE_UP).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!(found.library.path, library);
    assert!(mapped(&own.display().to_string()).is_some());
    assert_eq!(mapped(&other.display().to_string()), None);
}

#[test]
fn an_empty_library_is_told_as_such_and_the_next_is_taken() {
    let (root, get) = machine();
    let empty = root.path().join("first/libswitchyard-nothing.so.2");
    fs::write(&empty, "").unwrap();
    let places = Places::new(get, root.path(), None);
    let Err(Error::NotLoaded { text, .. }) = places.open(&MADE_UP).map(|_| ()) else { panic!("not refused") };
    assert!(text.contains(&empty.display().to_string()) && text.contains("file too short"), "{text}");
    let second = root.path().join("second/libswitchyard-nothing.so.2");
    any_library(&second);
    let found = places.open(&MADE_UP).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!((found.origin, found.library.path), (Origin::Variable, second));
}
