//! Fills in the measured figures of documents. From templates and the result files,
//! `xtask/src/performance.md` becomes `docs/performance.md`, and `xtask/src/figures.md` the table
//! in `README.md`.
//!
//! A placeholder is `{{FILE | PATH | DECIMALS}}`, `{{FILE | PATH | DECIMALS | xFACTOR}}` (or
//! `/DIVISOR`), or `{{FILE | PATH}}` for a text. FILE is a file in `docs/results` without `.json`.
//! PATH names fields separated by dots: `cluster.0.placed` takes the first element of a list,
//! `rows[case=gpt][threads=1].ratio` the only element whose fields have these values. After
//! `least`, `most` or `median`, the rest of the path is evaluated for each element of a list:
//! `oneProcess.least.stepMs`, `rows[case=gpt].most.ratio`. `PATH / PATH` is the ratio of two
//! values. A missing value becomes `–`.
//!
//! `{{each FILE | LIST}} … {{end}}` repeats its body for each element of a list; `rows[case=gpt]`
//! selects the elements with that field value. In the body, the file `item` is the current element,
//! and `@NAME` in a placeholder is its field of that name.

use crate::workspace::root;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Page templates, and the files that they become.
const PAGES: [(&str, &str); 2] = [
    ("docs/performance.md", include_str!("performance.md")),
    ("docs/dev/experiments.md", include_str!("experiments.md")),
];
/// Template of the README's table, and the markers around it.
const TABLE: &str = include_str!("figures.md");
const BEGIN: &str = "<!-- figures: generated from xtask/src/figures.md and docs/results by `cargo xtask gen` -->\n";
const END: &str = "<!-- end of the figures -->";

/// The generated files with their texts.
///
/// # Errors
/// A placeholder that cannot be filled, with the reason. The README cannot be read, or lacks the
/// markers.
pub(crate) fn generated() -> Result<Vec<(PathBuf, String)>> {
    let results = root().join("docs/results");
    let readme = fs::read_to_string(root().join("README.md")).context("README.md")?;
    let parts = readme.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = parts.with_context(|| format!("README.md: expected {BEGIN}and after it {END}"))?;
    let readme = format!("{before}{BEGIN}{}{END}{after}", fill(TABLE, &results)?);
    let pages = PAGES.iter().map(|(path, text)| Ok((PathBuf::from(path), fill(text, &results)?)));
    pages.chain([Ok(("README.md".into(), readme))]).collect()
}

/// Fills the placeholders of a text from the files of a folder.
fn fill(text: &str, results: &Path) -> Result<String> {
    fill_for(text, &Files { results, item: None, read: &RefCell::default() })
}

/// Sources of the figures.
struct Files<'a> {
    results: &'a Path,
    /// The current element of a list.
    item: Option<&'a Json>,
    /// Files by name, cached because hundreds of placeholders refer to the same few, and the
    /// largest is half a megabyte.
    read: &'a RefCell<BTreeMap<String, Rc<Json>>>,
}

impl Files<'_> {
    fn read(&self, file: &str) -> Result<Rc<Json>> {
        if let Some(item) = self.item.filter(|_| file == "item") {
            return Ok(Rc::new(item.clone()));
        }
        if let Some(json) = self.read.borrow().get(file) {
            return Ok(Rc::clone(json));
        }
        let name = self.results.join(format!("{file}.json"));
        let text = fs::read_to_string(&name).with_context(|| name.display().to_string())?;
        let json: Rc<Json> = Rc::new(serde_json::from_str(&text).with_context(|| name.display().to_string())?);
        self.read.borrow_mut().insert(file.to_owned(), Rc::clone(&json));
        Ok(json)
    }
}

fn fill_for(text: &str, files: &Files<'_>) -> Result<String> {
    let (mut page, mut rest) = (String::new(), text);
    while let Some((before, part)) = rest.split_once("{{") {
        page.push_str(before);
        let (placeholder, after) =
            part.split_once("}}").with_context(|| format!("an unterminated placeholder: {part}"))?;
        let filled = || -> Result<(String, &str)> {
            let Some(list) = placeholder.strip_prefix("each ") else { return Ok((figure(placeholder, files)?, after)) };
            let (block, after) = after.split_once("{{end}}").context("expected {{end}} after it")?;
            let (file, path) = list.split_once('|').context("expected each FILE | LIST")?;
            let file = files.read(file.trim())?;
            let list = select(&file, path.trim())?;
            ensure!(!list.is_empty(), "the list is empty");
            let of = |item: &Json| fill_for(block, &Files { item: Some(item), ..*files });
            Ok((list.iter().map(of).collect::<Result<_>>()?, after))
        };
        let (filled, after) = filled().with_context(|| format!("{{{{{placeholder}}}}}"))?;
        page.push_str(&filled);
        rest = after;
    }
    Ok(page + rest)
}

/// Replaces `@NAME` in a placeholder by the element's field.
fn named(placeholder: &str, item: &Json) -> Result<String> {
    let mut parts = placeholder.split('@');
    let mut text = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let end = part.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(part.len());
        text.push_str(&text_of(&value(item, &part[..end])?));
        text.push_str(&part[end..]);
    }
    Ok(text)
}

/// Formats a value: a string without quotes, a number as written.
fn text_of(value: &Json) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

fn figure(placeholder: &str, files: &Files<'_>) -> Result<String> {
    let placeholder = files.item.map_or_else(|| Ok(placeholder.to_string()), |item| named(placeholder, item))?;
    let words: Vec<&str> = placeholder.split('|').map(str::trim).collect();
    let (file, path, decimals, factor) = match words[..] {
        [file, path] => (file, path, None, 1.0),
        [file, path, decimals] => (file, path, Some(decimals), 1.0),
        [file, path, decimals, factor] => {
            let times = factor.strip_prefix('x').and_then(|factor| factor.parse().ok());
            let by =
                factor.strip_prefix('/').and_then(|divisor| divisor.parse().ok()).map(|divisor: f64| 1.0 / divisor);
            let expected = || format!("got the factor `{factor}`; expected x0.001, /3600 or the like");
            (file, path, Some(decimals), times.or(by).with_context(expected)?)
        }
        _ => bail!("expected FILE | PATH, and for a number | DECIMALS and perhaps | xFACTOR"),
    };
    let file = files.read(file)?;
    let found = quotient(&file, path)?;
    match (&found, decimals) {
        (Json::Null, _) => Ok("–".into()),
        (Json::String(text), None) => Ok(text.clone()),
        (Json::Number(number), Some(decimals)) => {
            let places = decimals.parse().with_context(|| format!("got the decimals `{decimals}`"))?;
            // Round halves up: 6.35 is slightly less than that in binary.
            let number = number.as_f64().context("no finite number")? * factor * (1.0 + 1e-12);
            Ok(format!("{number:.places$}"))
        }
        _ => bail!("got {found}; expected a text, or a number and how many decimals"),
    }
}

/// The value at a path, or the quotient of the values at two paths.
fn quotient(from: &Json, path: &str) -> Result<Json> {
    let Some((above, below)) = path.split_once(" / ") else { return value(from, path) };
    let number = |path: &str| value(from, path)?.as_f64().with_context(|| format!("{path}: no number"));
    Ok(Json::from(number(above)? / number(below)?))
}

/// The value at a path.
fn value(from: &Json, path: &str) -> Result<Json> {
    if path.is_empty() {
        return Ok(from.clone());
    }
    if path.starts_with('[') {
        let (condition, found, rest) = filter(from, path)?;
        // Further conditions select among these.
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
    value(found.with_context(|| format!("got no value for `{name}`"))?, rest)
}

/// Selects list elements by the condition at the start of a path. Returns the condition, the
/// elements, and the rest of the path.
fn filter<'a>(from: &Json, path: &'a str) -> Result<(&'a str, Vec<Json>, &'a str)> {
    let (condition, rest) = path[1..].split_once(']').with_context(|| format!("no `]` after {path}"))?;
    let (key, wanted) = condition.split_once('=').with_context(|| format!("[{condition}]: expected KEY=VALUE"))?;
    let list = from.as_array().with_context(|| format!("[{condition}]: no list"))?;
    // Numbers are compared as text.
    let is = |item: &&Json| value(item, key).is_ok_and(|field| text_of(&field) == wanted);
    Ok((condition, list.iter().filter(is).cloned().collect(), rest))
}

/// All elements of a list that a path selects.
fn select(from: &Json, path: &str) -> Result<Vec<Json>> {
    let (name, mut rest) = path.split_at(path.find('[').unwrap_or(path.len()));
    let mut found = value(from, name)?;
    while rest.starts_with('[') {
        let (_, next, behind) = filter(&found, rest)?;
        (found, rest) = (next.into(), behind);
    }
    ensure!(rest.is_empty(), "got `{rest}` behind the conditions of a list");
    found.as_array().cloned().with_context(|| format!("{path}: no list"))
}

/// Functions that fold a list of numbers into one.
const FOLDS: [&str; 3] = ["least", "most", "median"];

/// The minimum, maximum or median of the values at a path in each element of a list.
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

    /// If this fails: run `cargo xtask gen`, review `git diff docs`, and commit it with the change
    /// that caused it.
    #[test]
    fn the_documents_match_the_result_files() {
        for (path, expected) in generated().unwrap() {
            let committed = fs::read_to_string(root().join(&path)).unwrap_or_default();
            assert!(committed == expected, "{} differs: run `cargo xtask gen`", path.display());
        }
    }

    #[test]
    fn placeholders_are_filled_or_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"cpu": "A (b)", "rows": [{"case": "x", "threads": 1, "ms": 1.26}, {"case": "x", "threads": 2, "ms": 3},
            {"inner": {"way": 2}, "ms": 5}],
            "list": [4, 1, 2, 9], "half": 6.35, "none": null}"#;
        fs::write(folder.path().join("a.json"), text).unwrap();
        let fill_one = |placeholder: &str| fill(&format!("<{{{{{placeholder}}}}}>"), folder.path());
        for (placeholder, expected) in [
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
            ("a | half | 2 | /2", "<3.18>"),
            ("a | none | 1", "<–>"),
        ] {
            assert_eq!(fill_one(placeholder).unwrap(), expected, "{placeholder}");
        }
        let each = "{{each a | rows[case=x]}}{{item | threads | 0}}: {{item | ms | 1}} of {{a | rows[threads=@threads].ms | 2}}; {{end}}{{a | half | 1}}";
        assert_eq!(fill(each, folder.path()).unwrap(), "1: 1.3 of 1.26; 2: 3.0 of 3.00; 6.4");
        for (placeholder, words) in [
            ("each a | rows[case=x]", "expected {{end}}"),
            ("each a | rows[case=y]}}{{end", "the list is empty"),
            ("each a | cpu}}{{end", "cpu: no list"),
            ("b | cpu", "b.json"),
            ("a | gone | 1", "got no value for `gone`"),
            ("a | rows[case=x].ms | 1", "2 fit; expected one"),
            ("a | rows[case=y].ms | 1", "0 fit; expected one"),
            ("a | cpu | 1", "expected a text, or a number"),
            ("a | rows.0.ms", "expected a text, or a number"),
            ("a | rows.0.ms | 1 | 10", "expected x0.001, /3600"),
            ("a", "expected FILE | PATH"),
        ] {
            let refused = format!("{:#}", fill_one(placeholder).unwrap_err());
            assert!(refused.contains(words), "{placeholder}: {refused}");
        }
    }
}
