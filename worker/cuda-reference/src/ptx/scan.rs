//! Splits PTX text into tokens with line numbers.

use super::ParseError;

/// A word, a number, a quoted string, or one punctuation character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    pub(super) line: u32,
}

/// Characters of words: names, opcodes with their modifiers, numbers.
fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'$' | b'%')
}

pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ParseError> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
                continue;
            }
            byte if byte.is_ascii_whitespace() || byte == 0 => {
                at += 1;
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
                continue;
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                let end = text[at..].find("*/").ok_or_else(|| ParseError::new(line, "a comment without its end"))?;
                line += text[at..at + end].matches('\n').count() as u32;
                at += end + 2;
                continue;
            }
            b'"' => {
                let length = text[at + 1..].find('"').ok_or_else(|| ParseError::new(line, "a text without its end"))?;
                at += length + 2;
            }
            byte if is_word(byte) => {
                // `L1::no_allocate` is one word; `label:` is not.
                while bytes.get(at).is_some_and(|byte| is_word(*byte)) || text[at..].starts_with("::") {
                    at += if bytes[at] == b':' { 2 } else { 1 };
                }
            }
            byte if byte.is_ascii_punctuation() => at += 1,
            byte => return Err(ParseError::new(line, format!("the byte {byte:#04x}, which is not PTX"))),
        }
        found.push(Token { text: &text[start..at], line });
    }
    Ok(found)
}
