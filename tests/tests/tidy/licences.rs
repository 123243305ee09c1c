//! Licences: ours, and the dependencies' licences against the list in `deny.toml`.

use crate::tidy::{caught, members, metadata, none, read, repository_files};
use serde_json::Value;

/// Licences that `deny.toml` allows.
fn allowed(deny: &str) -> Vec<String> {
    let list = deny.split("\nallow = [").nth(1).and_then(|rest| rest.split("\n]").next()).unwrap_or_default();
    let lines = list.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| Some(line.trim_end_matches(',').strip_prefix('"')?.strip_suffix('"')?.to_string()))
        .collect()
}

/// Whether the allowed licences satisfy an SPDX expression. `/` is the deprecated form of `OR`.
fn satisfied(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    either(&mut rest, allowed) && rest.is_empty()
}

fn either(words: &mut &[&str], allowed: &[String]) -> bool {
    let mut result = both(words, allowed);
    while words.first() == Some(&"OR") {
        *words = &words[1..];
        result |= both(words, allowed);
    }
    result
}

fn both(words: &mut &[&str], allowed: &[String]) -> bool {
    let mut result = one(words, allowed);
    while words.first() == Some(&"AND") {
        *words = &words[1..];
        result &= one(words, allowed);
    }
    result
}

fn one(words: &mut &[&str], allowed: &[String]) -> bool {
    let Some((first, rest)) = words.split_first() else { return false };
    *words = rest;
    if *first == "(" {
        let result = either(words, allowed);
        if words.first() == Some(&")") {
            *words = &words[1..];
        }
        return result;
    }
    if let ["WITH", exception, rest @ ..] = *words {
        // A licence with an exception counts as a separate licence.
        let whole = format!("{first} WITH {exception}");
        *words = rest;
        return allowed.contains(&whole);
    }
    allowed.iter().any(|known| known == first)
}

fn check_dependencies(metadata: &Value, allowed: &[String]) -> Vec<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .filter(|package| !package["license"].as_str().is_some_and(|licence| satisfied(licence, allowed)))
        .map(|package| {
            format!(
                "{} {}: licence {} is not on the list of deny.toml",
                package["name"], package["version"], package["license"]
            )
        })
        .collect()
}

fn check_manifest(file: &str, text: &str) -> Option<String> {
    let (line, section) = if text.contains("\n[workspace.package]") {
        ("license = \"Apache-2.0\"", "[workspace.lints")
    } else {
        ("license.workspace = true", "[lints]\nworkspace = true")
    };
    let fine = text.lines().any(|found| found == line) && text.contains(section);
    (!fine).then(|| format!("{file}: expected a line `{line}`, and `{section}`"))
}

#[test]
fn dependencies_have_permitted_licences() {
    let allowed = allowed(&read("deny.toml").unwrap());
    assert!(allowed.contains(&"MIT".to_string()) && allowed.contains(&"BSL-1.0".to_string()), "{allowed:?}");
    assert!(metadata()["packages"].as_array().is_some_and(|packages| packages.len() > 50));
    none(&check_dependencies(metadata(), &allowed));
}

#[test]
fn all_our_packages_are_apache_2() {
    let manifests = repository_files().iter().filter(|file| file.ends_with("Cargo.toml"));
    let faults: Vec<String> = manifests.filter_map(|file| check_manifest(file, &read(file).unwrap())).collect();
    none(&faults);
    for package in members(metadata()) {
        assert_eq!(package["license"], "Apache-2.0", "{}", package["name"]);
    }
    let text = read("LICENSE").unwrap();
    assert!(text.contains("Apache License\n                           Version 2.0, January 2004"));
    assert!(text.contains("END OF TERMS AND CONDITIONS"), "the text is not complete");
}

#[test]
fn other_licences_are_caught() {
    let allowed = ["MIT", "Apache-2.0", "BSD-3-Clause"].map(String::from);
    for fine in [
        "MIT",
        "MIT OR GPL-3.0",
        "MIT/Apache-2.0",
        "(GPL-2.0 OR MIT) AND BSD-3-Clause",
        "Apache-2.0 WITH LLVM-exception OR MIT",
    ] {
        assert!(satisfied(fine, &allowed), "{fine}");
    }
    for wrong in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR ISC) AND MPL-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "MIT MIT",
        "mit",
    ] {
        assert!(!satisfied(wrong, &allowed), "{wrong}");
    }
    let faulty = serde_json::json!({"packages": [
        {"name": "fine", "version": "1.0.0", "license": "MIT"},
        {"name": "copyleft", "version": "1.0.0", "license": "GPL-3.0"},
        {"name": "silent", "version": "1.0.0", "license": null},
    ]});
    let faults = check_dependencies(&faulty, &allowed);
    caught(&faults, &["copyleft", "silent"]);
    assert_eq!(faults.len(), 2);
    assert!(check_manifest("x/Cargo.toml", "[package]\nlicense = \"MIT\"\n[lints]\nworkspace = true").is_some());
    assert!(check_manifest("x/Cargo.toml", "[package]\nlicense.workspace = true\n").is_some());
    assert!(
        check_manifest("x/Cargo.toml", "[package]\nlicense.workspace = true\n[lints]\nworkspace = true\n").is_none()
    );
}
