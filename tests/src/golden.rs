//! Goldens that show only their difference from another one.

use similar::{ChangeTag, TextDiff};

/// The changed lines between two texts, `-` and `+`, with one line of context around each group.
/// Groups are separated by `...`. Returns the second text if that is shorter.
pub fn difference(base: &str, text: &str) -> String {
    let diff = TextDiff::from_lines(base, text);
    let group = |operations: &[similar::DiffOp]| -> String {
        let changes = operations.iter().flat_map(|operation| diff.iter_changes(operation));
        changes
            .map(|change| {
                let sign = match change.tag() {
                    ChangeTag::Delete => '-',
                    ChangeTag::Insert => '+',
                    ChangeTag::Equal => ' ',
                };
                format!("{sign}{}\n", change.value().trim_end_matches('\n'))
            })
            .collect()
    };
    let changes = diff.grouped_ops(1).iter().map(|operations| group(operations)).collect::<Vec<_>>().join("...\n");
    if changes.lines().count() <= text.lines().count() { changes } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn only_changed_lines_and_their_neighbours_are_shown() {
        let base = "a\nb\nc\nd\ne\nf\ng\nh\n";
        assert_eq!(difference(base, base), "");
        assert_eq!(difference(base, "a\nb\nC\nd\ne\nf\ng\n"), " b\n-c\n+C\n d\n...\n g\n-h\n");
        assert_eq!(difference(base, "a\n"), "a\n");
    }
}
