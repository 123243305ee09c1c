//! The table of forgeries in `docs/security.md`, from the list that the tests try.

use crate::workspace::root;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

const PAGE: &str = "docs/security.md";
const LIST: &str = "tests/tests/tenants/forgeries.yaml";
const BEGIN: &str = "<!-- forgeries: generated from tests/tests/tenants/forgeries.yaml by `cargo xtask gen` -->\n";
const END: &str = "<!-- end of the forgeries -->";

#[derive(Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum By {
    Policies,
    Rights,
    Nobody,
}

/// The fields of `Row` in `tests/tests/tenants.rs` that the table shows.
#[derive(Deserialize)]
struct Forgery {
    title: String,
    who: String,
    by: By,
    answer: String,
}

impl Forgery {
    fn who(&self) -> &'static str {
        if self.who == "mallory" { "editor of another namespace" } else { "editor of the same namespace" }
    }

    fn answer(&self) -> String {
        match self.by {
            By::Nobody => "accepted, without effect on the job".into(),
            By::Policies | By::Rights => format!("`{}`", self.answer),
        }
    }
}

/// The page with its current table.
///
/// # Errors
/// The list or the page cannot be read, or the page lacks the markers.
pub(crate) fn generated() -> Result<(PathBuf, String)> {
    let list = fs::read_to_string(root().join(LIST)).context(LIST)?;
    let page = fs::read_to_string(root().join(PAGE)).context(PAGE)?;
    let parts = page.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = parts.with_context(|| format!("{PAGE}: expected {BEGIN}and after it {END}"))?;
    let forgeries: Vec<Forgery> = serde_saphyr::from_str(&list).context(LIST)?;
    Ok((PAGE.into(), format!("{before}{BEGIN}{}{END}{after}", table(&forgeries))))
}

/// One row for each user and answer, in the order of the list.
fn table(forgeries: &[Forgery]) -> String {
    let mut rows: Vec<(&str, String, Vec<&str>)> = Vec::new();
    for forgery in forgeries {
        let (who, answer) = (forgery.who(), forgery.answer());
        match rows.iter_mut().find(|row| row.0 == who && row.1 == answer) {
            Some(row) => row.2.push(&forgery.title),
            None => rows.push((who, answer, vec![&forgery.title])),
        }
    }
    let mut table = format!("\nAll {} forgeries:\n\n| who | answer | forgeries |\n|---|---|---|\n", forgeries.len());
    for (who, answer, titles) in rows {
        let _ = writeln!(table, "| {who} | {answer} | {} |", titles.join("; "));
    }
    table.push('\n');
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If this fails: run `cargo xtask gen`.
    #[test]
    fn the_security_page_lists_every_forgery() {
        let (path, expected) = generated().unwrap();
        assert!(fs::read_to_string(root().join(path)).unwrap() == expected, "{PAGE} differs: run `cargo xtask gen`");
    }

    #[test]
    fn forgeries_with_the_same_user_and_answer_share_a_row() {
        let forgery =
            |title: &str, who: &str, by: By| Forgery { title: title.into(), who: who.into(), by, answer: "no".into() };
        let table = table(&[
            forgery("a", "mallory", By::Policies),
            forgery("b", "colleague", By::Rights),
            forgery("c", "mallory", By::Policies),
            forgery("d", "mallory", By::Nobody),
        ]);
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| editor")).collect();
        assert_eq!(
            rows,
            [
                "| editor of another namespace | `no` | a; c |",
                "| editor of the same namespace | `no` | b |",
                "| editor of another namespace | accepted, without effect on the job | d |",
            ]
        );
        assert!(table.contains("All 4 forgeries"));
    }
}
