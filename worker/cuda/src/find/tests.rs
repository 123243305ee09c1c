use super::*;
use std::fs;
use tempfile::TempDir;

/// A machine with directories for every rule, and a Python in a virtual environment.
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
const NONEXISTENT: LibrarySpec = LibrarySpec {
    name: "nothing",
    files: &["libswitchyard-nothing.so.2", "libswitchyard-nothing.so"],
    companion_prefix: Some("libswitchyard-nothing-own.so."),
    from_driver: false,
};

#[test]
fn the_order_is_variable_loader_toolkit_python() {
    let (root, get) = machine();
    let places = Places::new(get, root.path(), None);
    let candidates = places.candidates(&NONEXISTENT);
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
fn driver_libraries_are_found_where_a_runtime_mounts_them() {
    let (root, get) = machine();
    let of_driver = LibrarySpec { from_driver: true, ..NONEXISTENT };
    let folder = root.path().join("usr/lib64");
    fs::create_dir_all(&folder).unwrap();
    let library = folder.join("libswitchyard-nothing.so.2");
    any_library(&library);
    let places = Places::new(get, root.path(), None);
    let found = places.open(&of_driver).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!((found.origin, found.library.path), (Origin::Driver, library));
    assert!(places.open(&NONEXISTENT).is_err(), "libraries of a toolkit are not there");
}

#[test]
fn a_named_python_replaces_the_others() {
    let (root, get) = machine();
    let places = Places::new(get, root.path(), Some(&root.path().join("python/bin/python3")));
    assert!(places.python.iter().all(|folder| folder.starts_with(root.path().join("python"))), "{:?}", places.python);
    assert_eq!(places.python.len(), 2);
}

#[test]
fn a_missing_library_reports_all_candidates() {
    let (root, get) = machine();
    let places = Places::new(get, root.path(), None);
    let Err(Error::NotFound { library, tried }) = places.open(&NONEXISTENT).map(|_| ()) else { panic!("found") };
    assert_eq!(library, NONEXISTENT.name);
    assert_eq!(tried.len(), places.candidates(&NONEXISTENT).len());
}

/// A loadable library.
fn any_library(to: &Path) {
    let real = mapped("libc.so").unwrap();
    fs::copy(real, to).unwrap();
}

/// A file mapped into this process, by a part of its path.
fn mapped(part: &str) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut files = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    files.find(|file| file.contains(part)).map(str::to_owned)
}

#[test]
fn a_librarys_own_files_are_opened_with_it() {
    let (root, get) = machine();
    let [library, own, other] = ["libswitchyard-nothing.so.2", "libswitchyard-nothing-own.so.7", "libother.so.7"]
        .map(|file| root.path().join("first").join(file));
    for file in [&library, &own, &other] {
        any_library(file);
    }
    let found = Places::new(get, root.path(), None).open(&NONEXISTENT).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!(found.library.path, library);
    assert!(mapped(&own.display().to_string()).is_some());
    assert_eq!(mapped(&other.display().to_string()), None);
}

#[test]
fn an_invalid_file_is_reported_and_the_next_is_tried() {
    let (root, get) = machine();
    let empty = root.path().join("first/libswitchyard-nothing.so.2");
    fs::write(&empty, "").unwrap();
    let places = Places::new(get, root.path(), None);
    let Err(Error::NotLoaded { text, .. }) = places.open(&NONEXISTENT).map(|_| ()) else { panic!("not refused") };
    assert!(text.contains(&empty.display().to_string()) && text.contains("file too short"), "{text}");
    let second = root.path().join("second/libswitchyard-nothing.so.2");
    any_library(&second);
    let found = places.open(&NONEXISTENT).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!((found.origin, found.library.path), (Origin::Variable, second));
}
