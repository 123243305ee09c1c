//! Accepted and refused chart values.

use crate::chart::files;
use serde_json::Value;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use switchyard_tests::chart::{chart, render};

#[test]
fn valid_values_are_accepted() {
    let found = files("accepted");
    assert!(found.len() >= 5);
    for (name, path, _) in found {
        let rendered = render(&["--set", "crds.enabled=false", "--values", path.to_str().unwrap()]);
        assert!(rendered.is_ok(), "{name}: {:#}", rendered.unwrap_err());
    }
}

/// The first line of each file is the expected message.
#[test]
fn invalid_values_are_refused_and_named() {
    let found = files("rejected");
    assert!(found.len() >= 15);
    for (name, path, text) in found {
        let words = text.lines().next().unwrap().trim_start_matches("# ");
        match render(&["--set", "crds.enabled=false", "--values", path.to_str().unwrap()]) {
            Ok(_) => panic!("{name}: accepted; expected a refusal with `{words}`"),
            Err(error) => assert!(error.to_string().contains(words), "{name}: the message lacks `{words}`: {error}"),
        }
    }
}

/// Paths of all sections and leaves in the schema.
fn paths(schema: &Value, above: &str, all: &mut Vec<(String, bool)>) {
    for (key, value) in schema["properties"].as_object().into_iter().flatten() {
        let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        all.push((path.clone(), value["properties"].is_null()));
        paths(value, &path, all);
    }
}

fn all_paths() -> Vec<(String, bool)> {
    let schema: Value =
        serde_json::from_str(&std::fs::read_to_string(chart().join("values.schema.json")).unwrap()).unwrap();
    let mut all = Vec::new();
    paths(&schema, "", &mut all);
    // For parent charts. It is not in values.yaml.
    all.retain(|(path, _)| path != "enabled");
    assert!(all.len() > 100, "{}", all.len());
    all
}

/// `helm upgrade --reuse-values` passes an older chart's values to this one, so any value can be
/// missing.
#[test]
fn a_missing_value_is_not_an_error() {
    let all = all_paths();
    let next = AtomicUsize::new(0);
    let faults = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((path, _)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let missing = format!("{path}=null");
                    // Render without the CRDs, which take most of the time, except when testing
                    // their own section.
                    let other = if path.starts_with("crds") { "nameOverride=" } else { "crds.enabled=false" };
                    match render(&["--set", other, "--set", &missing]) {
                        Ok(text) if text.contains("<nil>") || text.contains("%!") => {
                            faults.lock().unwrap().push(format!("{path}: renders an empty or invalid value"));
                        }
                        Ok(_) => {}
                        Err(error) => faults.lock().unwrap().push(format!("{path}: {error}")),
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{} of {} paths:\n{}", faults.len(), all.len(), faults.join("\n"));
}

#[test]
fn every_value_is_read_by_a_template() {
    fn texts(folder: &std::path::Path, all: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("crds") {
                texts(&path, all);
            } else if path.is_file() {
                all.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut templates = std::fs::read_to_string(chart().join("templates/crds/trainjobs.yaml")).unwrap();
    templates.truncate(1000);
    texts(&chart().join("templates"), &mut templates);
    let is_read = |path: &str| {
        let key = path.rsplit('.').next().unwrap();
        templates.contains(&format!(".{key}")) || templates.contains(&format!("\"{key}\""))
    };
    let all = all_paths();
    let unread: Vec<&str> =
        all.iter().filter(|(path, is_leaf)| *is_leaf && !is_read(path)).map(|(path, _)| path.as_str()).collect();
    assert!(unread.is_empty(), "{unread:?}");
    assert!(!is_read("controller.neverReadByAnything"));
}
