//! Modules of a crate must not import each other in cycles. A module and its submodules may import
//! each other, because shared code is often in the parent. Names that a parent re-exports (`pub
//! use`) count as the parent's.

use crate::tidy::purity::{is_below, test_files};
use crate::tidy::tokens::Mentions;
use crate::tidy::{RustFile, caught, none, rust_files};
use std::collections::{BTreeMap, BTreeSet};

/// A module path: crate folder, then names.
type Module = Vec<String>;
/// Modules that each module imports.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

/// Crate folders: those with a `lib.rs`, or with only a `main.rs`.
fn crates(files: &[RustFile]) -> BTreeSet<String> {
    let paths = files.iter().map(|file| file.path.as_str());
    let roots = paths.filter_map(|file| file.strip_suffix("/lib.rs").or(file.strip_suffix("/main.rs")));
    roots.map(str::to_owned).collect()
}

/// The module in a file; `None` if it does not belong to a crate's library.
fn module(file: &str, crates: &BTreeSet<String>) -> Option<Module> {
    let folder = crates.iter().filter(|folder| is_below(file, folder)).max_by_key(|folder| folder.len())?;
    let inside = file.strip_prefix(folder.as_str())?.strip_suffix(".rs")?.trim_start_matches('/');
    let mut names: Vec<&str> = inside.split('/').collect();
    if matches!(names.last(), Some(&"lib" | &"main" | &"mod")) {
        names.pop();
    }
    Some([folder.as_str()].into_iter().chain(names).map(str::to_owned).collect())
}

/// The module that a path in `from` refers to.
fn named(path: &[String], from: &Module, known: &BTreeSet<Module>) -> Option<Module> {
    let mut at: Module = from.clone();
    let mut rest = path;
    let is_relative = match path.first()?.as_str() {
        "crate" => {
            at.truncate(1);
            true
        }
        "self" | "super" => true,
        _ => false,
    };
    while let Some(first) = rest.first().filter(|first| matches!(first.as_str(), "crate" | "self" | "super")) {
        if first == "super" {
            at.pop();
        }
        rest = &rest[1..];
    }
    let length = at.len();
    for name in rest {
        at.push(name.clone());
        if !known.contains(&at) {
            at.pop();
            break;
        }
    }
    // Any other word is an item or another crate.
    ((is_relative || at.len() > length) && known.contains(&at) && at != *from).then_some(at)
}

fn imports(files: &[RustFile]) -> Imports {
    let (crates, tests) = (crates(files), test_files(files));
    let is_test = |file: &str| {
        tests.iter().any(|module| is_below(file, module)) || file.contains("/tests/") || file.contains("/benches/")
    };
    let product = files.iter().filter(|file| !is_test(&file.path) && !file.path.starts_with("tests/"));
    let modules: Vec<(Module, &Mentions)> =
        product.filter_map(|file| Some((module(&file.path, &crates)?, &file.mentions))).collect();
    let known: BTreeSet<Module> = modules.iter().map(|(module, _)| module.clone()).collect();
    let mut imports = Imports::new();
    for (module, mentions) in &modules {
        let paths = mentions.all.iter().filter(|mention| !mention.in_test).map(|mention| &mention.path);
        imports.entry(module.clone()).or_default().extend(paths.filter_map(|path| named(path, module, &known)));
    }
    imports
}

/// Modules within `among` that are reachable from a module.
fn reached<'a>(from: &'a Module, imports: &'a Imports, among: &BTreeSet<&'a Module>) -> BTreeSet<&'a Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        let named = imports[module].iter().filter(|named| among.contains(named));
        next.extend(named.filter(|named| seen.insert(*named)));
    }
    seen
}

/// Cycles among these modules, other than a parent with its submodules.
fn cycles<'a>(imports: &'a Imports, among: &BTreeSet<&'a Module>) -> Vec<Vec<&'a Module>> {
    let reach: BTreeMap<&Module, BTreeSet<&Module>> =
        among.iter().map(|module| (*module, reached(module, imports, among))).collect();
    let mut found = Vec::new();
    let mut left = among.clone();
    while let Some(module) = left.pop_first() {
        let circle: BTreeSet<&Module> =
            reach[module].iter().copied().filter(|other| reach[other].contains(module)).collect();
        left.retain(|other| !circle.contains(other));
        if circle.len() < 2 {
            continue;
        }
        // The shortest path is the parent, if all others start with it.
        let parent = circle.iter().copied().min_by_key(|module| module.len());
        match parent.filter(|parent| circle.iter().all(|module| module.starts_with(parent))) {
            Some(parent) => {
                let inside = circle.iter().copied().filter(|module| *module != parent).collect();
                found.extend(cycles(imports, &inside));
            }
            None => found.push(circle.into_iter().collect()),
        }
    }
    found
}

fn faults(files: &[RustFile]) -> Vec<String> {
    let imports = imports(files);
    let fault = |circle: Vec<&Module>| {
        let name = |module: &Module| module.join("/");
        let of = |module: &Module| -> Vec<String> {
            imports[module].iter().filter(|named| circle.contains(named)).map(name).collect()
        };
        let arrows: Vec<String> =
            circle.iter().map(|module| format!("{} imports {}", name(module), of(module).join(", "))).collect();
        format!("modules import each other in a cycle: {}", arrows.join("; "))
    };
    cycles(&imports, &imports.keys().collect()).into_iter().map(fault).collect()
}

#[test]
fn modules_import_each_other_in_one_direction() {
    none(&faults(rust_files()));
}

#[test]
fn import_cycles_are_caught() {
    let of = |files: &[(&'static str, &str)]| {
        faults(&files.iter().map(|(file, source)| RustFile::new(file, (*source).into())).collect::<Vec<_>>())
    };
    let root = ("src/plan/lib.rs", "mod a; mod b; pub use a::X;");
    let circle = of(&[root, ("src/plan/a.rs", "use crate::b::Y;"), ("src/plan/b.rs", "fn f(x: super::a::X) {}")]);
    caught(&circle, &["src/plan/a imports src/plan/b; src/plan/b imports src/plan/a"]);
    let cousins = of(&[
        root,
        ("src/plan/a/mod.rs", "mod inner; use inner::Z;"),
        ("src/plan/a/inner.rs", "use crate::b::{self, Y};"),
        ("src/plan/b.rs", "use crate::a;"),
    ]);
    caught(&cousins, &["src/plan/a/inner imports src/plan/b"]);
    // Allowed: a parent with its submodules, also through re-exported names; tests; a word that
    // only looks like a module.
    none(&of(&[
        root,
        ("src/plan/a/mod.rs", "mod inner; use inner::Z; pub struct X;"),
        ("src/plan/a/inner.rs", "use super::X; use crate::X as Same;"),
        ("src/plan/b.rs", "use crate::a::X; fn f() { other::a::Y; }"),
        ("src/plan/c.rs", "#[cfg(test)] mod tests { use crate::b::Y; } use self::d::Z;"),
        ("src/plan/c/d.rs", "use super::super::b::Y;"),
    ]));
}
