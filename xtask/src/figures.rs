//! Measured figures of the documents: `xtask/src/performance.md` with its holes filled from the result files becomes
//! `docs/performance.md`, and `xtask/src/figures.md` the table in `README.md`.
//!
//! A hole is `{{FILE | PATH | DECIMALS}}`, or `{{FILE | PATH | DECIMALS | xFACTOR}}`, or `{{FILE | PATH}}` for a text. FILE is one of
//! `docs/results` without `.json`. PATH names fields by dots: `cluster.0.placed` is the first of a list, `rows[case=gpt][threads=1].ratio` the
//! only one in a list whose fields are these, and behind `least`, `most` or `median` the path goes on in every one of a list:
//! `oneProcess.least.stepMs`, `rows[case=gpt].most.ratio`. `PATH / PATH` is how many times the first has the second.

use crate::workspace::root;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;
use std::fs;
use std::path::{Path, PathBuf};

/// The page with holes.
const PAGE: &str = include_str!("performance.md");
/// The table of the README with holes, and what stands around it there.
const TABLE: &str = include_str!("figures.md");
const BEGIN: &str = "<!-- figures: generated from xtask/src/figures.md and docs/results by `cargo xtask gen` -->\n";
const END: &str = "<!-- end of the figures -->";

/// The files and their texts.
///
/// # Errors
/// A hole that no figure fits: the hole, and what is wrong with it. The README cannot be read, or has no place for the table.
pub(crate) fn generated() -> Result<[(PathBuf, String); 2]> {
    let results = root().join("docs/results");
    let readme = fs::read_to_string(root().join("README.md")).context("README.md")?;
    let place = readme.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = place.with_context(|| format!("README.md: expected {BEGIN}and behind it {END}"))?;
    let readme = format!("{before}{BEGIN}{}{END}{after}", filled(TABLE, &results)?);
    Ok([("docs/performance.md".into(), filled(PAGE, &results)?), ("README.md".into(), readme)])
}

/// A text with its holes filled from the files of a folder.
fn filled(text: &str, results: &Path) -> Result<String> {
    let mut parts = text.split("{{");
    let mut page = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let (hole, after) = part.split_once("}}").with_context(|| format!("a hole without end: {part}"))?;
        page.push_str(&figure(hole, results).with_context(|| format!("{{{{{hole}}}}}"))?);
        page.push_str(after);
    }
    Ok(page)
}

fn figure(hole: &str, results: &Path) -> Result<String> {
    let words: Vec<&str> = hole.split('|').map(str::trim).collect();
    let (file, path, decimals, factor) = match words[..] {
        [file, path] => (file, path, None, 1.0),
        [file, path, decimals] => (file, path, Some(decimals), 1.0),
        [file, path, decimals, factor] => {
            let number = factor.strip_prefix('x').and_then(|factor| factor.parse().ok());
            (
                file,
                path,
                Some(decimals),
                number.with_context(|| format!("got the factor `{factor}`; expected x0.001 or the like"))?,
            )
        }
        _ => bail!("expected FILE | PATH, and for a number | DECIMALS and perhaps | xFACTOR"),
    };
    let name = results.join(format!("{file}.json"));
    let text = fs::read_to_string(&name).with_context(|| name.display().to_string())?;
    let found = quotient(&serde_json::from_str(&text)?, path)?;
    match (&found, decimals) {
        (Json::String(text), None) => Ok(text.clone()),
        (Json::Number(number), Some(decimals)) => {
            let places = decimals.parse().with_context(|| format!("got the decimals `{decimals}`"))?;
            // A half is rounded up: 6.35 is a little less than that in binary.
            let number = number.as_f64().context("no finite number")? * factor * (1.0 + 1e-12);
            Ok(format!("{number:.places$}"))
        }
        _ => bail!("got {found}; expected a text, or a number and how many decimals"),
    }
}

/// What stands at a path, or at one ÷ what stands at another.
fn quotient(from: &Json, path: &str) -> Result<Json> {
    let Some((above, below)) = path.split_once(" / ") else { return value(from, path) };
    let number = |path: &str| value(from, path)?.as_f64().with_context(|| format!("{path}: no number"));
    Ok(Json::from(number(above)? / number(below)?))
}

/// What stands at a path.
fn value(from: &Json, path: &str) -> Result<Json> {
    if path.is_empty() {
        return Ok(from.clone());
    }
    if let Some(rest) = path.strip_prefix('[') {
        let (condition, rest) = rest.split_once(']').with_context(|| format!("no `]` after {path}"))?;
        let (key, wanted) = condition.split_once('=').with_context(|| format!("[{condition}]: expected KEY=VALUE"))?;
        let list = from.as_array().with_context(|| format!("[{condition}]: no list"))?;
        // A number is chosen by its text.
        let text = |field: &Json| field.as_str().map_or_else(|| field.to_string(), str::to_string);
        let is = |item: &&Json| value(item, key).is_ok_and(|field| text(&field) == wanted);
        let found: Vec<Json> = list.iter().filter(is).cloned().collect();
        // Further conditions choose among them.
        if rest.starts_with('[') {
            return value(&found.into(), rest);
        }
        let rest = rest.trim_start_matches('.');
        if FOLDS.contains(&rest.split('.').next().unwrap_or_default()) {
            return value(&found.into(), rest);
        }
        ensure!(found.len() == 1, "[{condition}]: {} fit; expected one", found.len());
        return value(&found[0], rest);
    }
    let end = path.find(['.', '[']).unwrap_or(path.len());
    let (name, rest) = (&path[..end], path[end..].trim_start_matches('.'));
    if let Json::Array(list) = from
        && FOLDS.contains(&name)
    {
        return fold(list, name, rest);
    }
    let found = match from {
        Json::Array(list) => name.parse().ok().and_then(|at: usize| list.get(at)),
        from => from.get(name),
    };
    value(found.with_context(|| format!("there is no `{name}`"))?, rest)
}

/// What makes one number of a list.
const FOLDS: [&str; 3] = ["least", "most", "median"];

/// The least, the greatest or the middle of what stands at a path in each of a list.
fn fold(list: &[Json], how: &str, path: &str) -> Result<Json> {
    let number = |item: &Json| value(item, path)?.as_f64().with_context(|| format!("{path}: no number"));
    let mut numbers: Vec<f64> = list.iter().map(number).collect::<Result<_>>()?;
    numbers.sort_by(f64::total_cmp);
    let last = numbers.len().checked_sub(1).with_context(|| format!("{how} of an empty list"))?;
    Ok(Json::from(match how {
        "least" => numbers[0],
        "most" => numbers[last],
        _ => (numbers[last / 2] + numbers[last.div_ceil(2)]) / 2.0,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When this fails: run `cargo xtask gen`, look at `git diff docs`, and commit it with the change that caused it.
    #[test]
    fn the_documents_have_the_figures_of_the_files() {
        for (path, expected) in generated().unwrap() {
            let committed = fs::read_to_string(root().join(&path)).unwrap_or_default();
            assert!(committed == expected, "{} differs: run `cargo xtask gen`", path.display());
        }
    }

    #[test]
    fn holes_are_filled_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"cpu": "A (b)", "rows": [{"case": "x", "threads": 1, "ms": 1.26}, {"case": "x", "threads": 2, "ms": 3},
            {"inner": {"way": 2}, "ms": 5}],
            "list": [4, 1, 2, 9], "half": 6.35}"#;
        fs::write(folder.path().join("a.json"), text).unwrap();
        let fill = |hole: &str| filled(&format!("<{{{{{hole}}}}}>"), folder.path());
        for (hole, expected) in [
            ("a | cpu", "<A (b)>"),
            ("a | rows[case=x][threads=1].ms | 1", "<1.3>"),
            ("a | rows.1.ms | 0", "<3>"),
            ("a | rows.most.ms | 2 | x10", "<50.00>"),
            ("a | list.median | 1", "<3.0>"),
            ("a | half | 1", "<6.4>"),
            ("a | list.least | 0", "<1>"),
            ("a | rows[case=x].most.ms | 1", "<3.0>"),
            ("a | list.0 / list.2 | 1 | x1e3", "<2000.0>"),
            ("a | rows[inner.way=2].ms | 1", "<5.0>"),
        ] {
            assert_eq!(fill(hole).unwrap(), expected, "{hole}");
        }
        for (hole, words) in [
            ("b | cpu", "b.json"),
            ("a | gone | 1", "there is no `gone`"),
            ("a | rows[case=x].ms | 1", "2 fit; expected one"),
            ("a | rows[case=y].ms | 1", "0 fit; expected one"),
            ("a | cpu | 1", "expected a text, or a number"),
            ("a | rows.0.ms", "expected a text, or a number"),
            ("a | rows.0.ms | 1 | 10", "expected x0.001"),
            ("a", "expected FILE | PATH"),
        ] {
            let refused = format!("{:#}", fill(hole).unwrap_err());
            assert!(refused.contains(words), "{hole}: {refused}");
        }
    }
}
