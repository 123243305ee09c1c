//! HTML elements of the page.

use crate::report::markup::escaped;

/// An HTML fragment.
pub(super) type Page = String;

/// The content of a section, or why the run has none.
pub(super) type Body = Result<Page, &'static str>;

/// Most rows in a table of figures; of more windows, every nth is shown.
pub(super) const MAX_ROWS: usize = 60;

/// Text length in bytes above which a cell wraps.
const LONG: usize = 40;

/// A section with its heading.
pub(super) fn section(anchor: &str, heading: &str, body: &str) -> Page {
    format!(
        "<section id=\"{anchor}\" aria-labelledby=\"{anchor}-h\">\n<h2 id=\"{anchor}-h\">{heading}</h2>\n{body}</section>\n"
    )
}

pub(super) fn paragraph(text: &str) -> Page {
    format!("<p>{}</p>\n", coded(text))
}

/// A paragraph of less weight.
pub(super) fn aside(text: &str) -> Page {
    format!("<p class=\"soft\">{}</p>\n", coded(text))
}

/// Text with the `words` between backticks as code.
pub(super) fn coded(text: &str) -> Page {
    let mut page = String::new();
    let pieces: Vec<&str> = text.split('`').collect();
    for (index, piece) in pieces.iter().enumerate() {
        match index % 2 {
            0 => page.push_str(&escaped(piece)),
            // An unpaired backtick stays as it is.
            1 if index + 1 == pieces.len() => page.push_str(&format!("`{}", escaped(piece))),
            _ => page.push_str(&format!("<code>{}</code>", escaped(piece))),
        }
    }
    page
}

/// A chart with a caption, and its figures as a table.
pub(super) fn figure(svg: &str, caption: &str, table: &str) -> Page {
    format!(
        "<figure>{svg}<figcaption>{}</figcaption>\
         <details><summary>Figures of this chart</summary>{table}</details></figure>\n",
        coded(caption)
    )
}

/// A table whose rows start with a heading; columns of figures are right-aligned.
pub(super) fn table(caption: &str, columns: &[&str], rows: &[Vec<String>]) -> Page {
    let right = |column: usize| rows.iter().all(|row| row.get(column).is_none_or(|cell| is_figure(cell)));
    let right: Vec<bool> = (0..columns.len()).map(right).collect();
    let long = |column: usize| rows.iter().any(|row| row.get(column).is_some_and(|cell| cell.len() > LONG));
    let long: Vec<bool> = (0..columns.len()).map(long).collect();
    let is = |columns: &[bool], column: usize| columns.get(column).copied().unwrap_or(false);
    let class = |column: usize| match (is(&right, column), is(&long, column)) {
        (_, true) => " class=\"long\"",
        (true, _) => " class=\"number\"",
        _ => "",
    };
    let mut page = format!(
        "<div class=\"scroll\" role=\"group\" aria-label=\"{0}\" tabindex=\"0\"><table><caption>{0}</caption><thead><tr>",
        escaped(caption)
    );
    for (index, column) in columns.iter().enumerate() {
        page.push_str(&format!("<th scope=\"col\"{}>{}</th>", class(index), escaped(column)));
    }
    page.push_str("</tr></thead><tbody>");
    for row in rows {
        page.push_str("<tr>");
        for (index, cell) in row.iter().enumerate() {
            let cell = coded(cell);
            page.push_str(&match index {
                0 => format!("<th scope=\"row\"{}>{cell}</th>", class(index)),
                _ => format!("<td{}>{cell}</td>", class(index)),
            });
        }
        page.push_str("</tr>");
    }
    page.push_str("</tbody></table></div>\n");
    page
}

fn is_figure(cell: &str) -> bool {
    cell.chars().all(|letter| letter.is_ascii_digit() || " ,.-+%".contains(letter))
}

/// Every nth item of a list, so that at most [`MOST_ROWS`] remain.
pub(super) fn every<T>(list: &[T]) -> impl Iterator<Item = &T> {
    list.iter().step_by(list.len().div_ceil(MAX_ROWS).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_backticks_become_markup() {
        assert_eq!(coded("a `b<c` & `d"), "a <code>b&lt;c</code> &amp; `d");
        assert_eq!(coded("``"), "<code></code>");
    }

    #[test]
    fn long_lists_are_shortened_evenly() {
        let list: Vec<u32> = (0..1000).collect();
        assert_eq!(every(&list).count(), 59);
        assert_eq!(every(&list[..60]).count(), 60);
        assert_eq!(every(&list[..0]).count(), 0);
    }
}
