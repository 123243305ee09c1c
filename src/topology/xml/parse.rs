//! NCCL's reader (`xmlGetNode`, `xmlGetToken`, `xmlLoadSub`), except that it reports what stops
//! NCCL and continues.

use super::finding::{Findings, Rule};
use super::tables::{MAX_ATTRIBUTES, MAX_LEN};
use super::{Document, Element};

/// Maximum number of tags read: a dump of the largest NVLink domain, with room to spare.
const MAX_TAGS_READ: usize = 4096;

/// A file as far as it was readable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parsed {
    pub document: Document,
    /// Where NCCL stops reading.
    pub findings: Findings,
}

/// Parses the text of a topology file. Every text yields a document, possibly empty. The findings
/// list what NCCL would reject.
pub fn parse(text: &str) -> Parsed {
    let mut reader = Reader { text, at: 0, line: 1, open: Vec::new(), parsed: Parsed::default() };
    while reader.next() {}
    reader.end();
    reader.parsed
}

struct Reader<'a> {
    text: &'a str,
    /// Number of bytes read.
    at: usize,
    line: u32,
    /// Open tags, innermost last.
    open: Vec<usize>,
    parsed: Parsed,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn stop(&mut self, line: u32, got: impl Into<String>, fix: &str) {
        self.parsed.findings.add(&Rule::SYNTAX, Some(line), got, fix);
    }

    /// Skips and returns this many bytes.
    fn skip(&mut self, bytes: usize) -> &'a str {
        let passed = &self.rest()[..bytes];
        let lines = passed.bytes().filter(|byte| *byte == b'\n').count();
        self.line = self.line.saturating_add(u32::try_from(lines).unwrap_or(u32::MAX));
        self.at += bytes;
        passed
    }

    /// Skips everything up to and including this word, or to the end. Returns whether the word was
    /// found.
    fn skip_past(&mut self, word: &str) -> bool {
        let found = self.rest().find(word);
        self.skip(found.map_or(self.rest().len(), |at| at + word.len()));
        found.is_some()
    }

    /// Skips the text between tags, then reads one tag. Returns false at the end of the text.
    fn next(&mut self) -> bool {
        let line = self.line;
        let between = self.skip(self.rest().find('<').unwrap_or(self.rest().len()));
        if between.contains('\t') {
            self.stop(line, "a tab between tags", "indent with spaces");
        }
        if between.chars().any(|letter| !letter.is_ascii_whitespace()) {
            let word = between.split_ascii_whitespace().next().unwrap_or_default();
            self.stop(
                line,
                format!("text between tags: `{}`", short(word)),
                "take it out, or make it a comment: <!-- so -->",
            );
        }
        if self.peek().is_none() {
            return false;
        }
        let line = self.line;
        let rest = self.rest();
        if rest.starts_with("<!--") {
            self.comment();
        } else if rest.starts_with("<?") {
            let what = if rest.starts_with("<?xml") { "an XML declaration" } else { "a processing instruction" };
            self.stop(line, what, "take it out: the file begins with <system version=\"1\">");
            self.skip_past(">");
        } else if rest.starts_with("<!") {
            self.stop(line, "a declaration of XML", "take it out");
            self.skip_past(">");
        } else if rest.starts_with("</") {
            self.closing();
        } else {
            return self.opening();
        }
        true
    }

    fn comment(&mut self) {
        let line = self.line;
        let word = self.rest().split([' ', '>', '/', '\n', '\r']).next().unwrap_or_default();
        if word.contains('=') {
            self.stop(
                line,
                "a comment whose first word has a `=` in it",
                "begin the comment with a space: <!-- so -->",
            );
        } else if word.len() > MAX_LEN + 1 {
            self.stop(line, "a comment whose first word is too long", "begin the comment with a space: <!-- so -->");
        }
        self.skip("<!--".len());
        if !self.skip_past("-->") {
            self.stop(line, "a comment without an end", "end it: -->");
        }
    }

    fn closing(&mut self) {
        let line = self.line;
        self.skip("</".len());
        let name = self.skip(self.rest().find(['>', '<']).unwrap_or(self.rest().len())).to_string();
        if self.peek() == Some(b'>') {
            self.skip(1);
        } else {
            self.stop(line, format!("</{} without `>`", short(&name)), "write it without spaces: </pci>");
        }
        let tag = name.trim();
        if tag != name {
            self.stop(line, format!("spaces in </{}>", short(&name)), "write it without spaces: </pci>");
        }
        // An end tag also closes the open tags inside its own.
        let found = self.open.iter().rposition(|open| self.parsed.document.elements[*open].tag == tag);
        match found {
            Some(depth) if depth + 1 == self.open.len() => self.open.truncate(depth),
            Some(depth) => {
                let inner = self.open.last().map(|open| &self.parsed.document.elements[*open]);
                let inner =
                    inner.map_or(String::new(), |inner| format!("<{}> of line {}", short(&inner.tag), inner.line));
                self.stop(
                    line,
                    format!("</{}> before the end of {inner}", short(tag)),
                    "close the tags from the inside out",
                );
                self.open.truncate(depth);
            }
            None => self.stop(line, format!("</{}> without a beginning", short(tag)), "take it out, or open the tag"),
        }
    }

    fn opening(&mut self) -> bool {
        if self.parsed.document.elements.len() == MAX_TAGS_READ {
            self.stop(self.line, format!("more than {MAX_TAGS_READ} tags"), "describe one machine");
            self.skip(self.rest().len());
            return false;
        }
        let line = self.line;
        self.skip(1);
        let name = self.word().to_string();
        let mut element = Element { tag: name, line, parent: self.open.last().copied(), ..Element::default() };
        if element.tag.is_empty() {
            self.stop(line, "a tag without a name", "write `<` directly before the name");
        }
        let is_closed = self.attributes(&mut element);
        self.limits(&element);
        let elements = &mut self.parsed.document.elements;
        let own = elements.len();
        if let Some(parent) = element.parent {
            elements[parent].children.push(own);
        }
        elements.push(element);
        if !is_closed {
            self.open.push(own);
        }
        true
    }

    /// Reads a name, up to a character that ends it.
    fn word(&mut self) -> &'a str {
        let end = [' ', '\t', '\n', '\r', '=', '/', '>', '<'];
        self.skip(self.rest().find(end).unwrap_or(self.rest().len()))
    }

    /// Reads the attributes and the end of a tag. Returns whether the tag is self-closing.
    fn attributes(&mut self, element: &mut Element) -> bool {
        let line = element.line;
        let tag = short(&element.tag).to_string();
        loop {
            let gap = self.skip(self.rest().find(|c: char| !c.is_ascii_whitespace()).unwrap_or(self.rest().len()));
            if gap.contains(['\t', '\n', '\r', '\x0c']) {
                let fix = "write the tag on one line, with a space between two attributes";
                self.stop(line, format!("a tab or a new line within <{tag}>"), fix);
            }
            match self.peek() {
                None | Some(b'<') => {
                    self.stop(line, format!("<{tag} without `>`"), "end the tag: > or />");
                    return false;
                }
                Some(b'>') => {
                    self.skip(1);
                    return false;
                }
                Some(b'/') => {
                    self.skip(1);
                    let gap = self.rest().find(|c: char| !c.is_ascii_whitespace()).unwrap_or(self.rest().len());
                    if self.rest()[gap..].starts_with('>') {
                        if gap > 0 {
                            self.stop(line, format!("a space in the end of <{tag}>"), "end it with />");
                        }
                        self.skip(gap + 1);
                        return true;
                    }
                    self.stop(line, format!("a `/` within <{tag}>"), "put values in quotes; end the tag with />");
                }
                Some(b'=') => {
                    self.skip(1);
                    self.stop(line, format!("a `=` without a name in <{tag}>"), "write NAME=\"VALUE\" without spaces");
                }
                Some(_) => self.attribute(element, &tag),
            }
        }
    }

    fn attribute(&mut self, element: &mut Element, tag: &str) {
        let line = element.line;
        if self.text.as_bytes().get(self.at.wrapping_sub(1)).is_some_and(|before| matches!(before, b'"' | b'\'')) {
            self.stop(
                line,
                format!("two attributes of <{tag}> without a space between them"),
                "put a space between them",
            );
        }
        let name = self.word().to_string();
        let mut value = String::new();
        if self.peek() == Some(b'=') {
            self.skip(1);
            match self.peek() {
                Some(quote @ (b'"' | b'\'')) => {
                    self.skip(1);
                    let end = self.rest().find(char::from(quote));
                    value = self.skip(end.unwrap_or(self.rest().len())).to_string();
                    if end.is_some() {
                        self.skip(1);
                    } else {
                        self.stop(
                            line,
                            format!("{}= of <{tag}>: a quote without an end", short(&name)),
                            "end the quote",
                        );
                    }
                }
                _ => {
                    value = self.word().to_string();
                    self.stop(
                        line,
                        format!("{}= of <{tag}> without quotes", short(&name)),
                        "write NAME=\"VALUE\" without spaces",
                    );
                }
            }
        }
        element.attributes.push((name, value));
    }

    /// Reports a tag that exceeds NCCL's limits.
    fn limits(&mut self, element: &Element) {
        let line = Some(element.line);
        let parts = element.attributes.iter().flat_map(|(name, value)| [name, value]).chain([&element.tag]);
        for long in parts.filter(|part| part.len() > MAX_LEN) {
            let got = format!("{} characters in <{}>: `{}..`", long.len(), short(&element.tag), short(long));
            self.parsed.findings.add(&Rule::LIMIT, line, got, format!("at most {MAX_LEN}"));
        }
        let count = element.attributes.len();
        if count > MAX_ATTRIBUTES {
            let got = format!("{count} attributes in <{}>", short(&element.tag));
            self.parsed.findings.add(&Rule::LIMIT, line, got, format!("at most {MAX_ATTRIBUTES}"));
        }
    }

    fn end(&mut self) {
        while let Some(open) = self.open.pop() {
            let element = &self.parsed.document.elements[open];
            let (line, tag) = (element.line, short(&element.tag).to_string());
            self.stop(line, format!("<{tag}> is not closed"), "close it: with a tag of its own, or />");
        }
    }
}

/// Truncates a word for a message.
fn short(word: &str) -> &str {
    match word.char_indices().nth(40) {
        Some((end, _)) => &word[..end],
        None => word,
    }
}
