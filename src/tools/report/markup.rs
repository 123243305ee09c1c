//! Text in HTML and SVG.

/// Escapes text for HTML and XML 1.0, which allows neither control characters (except line feeds)
/// nor U+FFFE and U+FFFF.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' => escaped.push('\n'),
            '\u{fffe}' | '\u{ffff}' => escaped.push('?'),
            letter if letter.is_control() => escaped.push('?'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// Truncates a text to `bytes`, with a note about the rest.
pub(super) fn shortened(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.to_owned();
    }
    let end = (0..=bytes).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}… ({} bytes more)", &text[..end], text.len() - end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_never_becomes_markup() {
        assert_eq!(escaped("<a href='x'>&\"\u{1b}\u{ffff}\n"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;??\n");
    }

    #[test]
    fn a_long_text_is_cut_between_letters() {
        assert_eq!(shortened("ääää", 3), "ä… (6 bytes more)");
        assert_eq!(shortened("ää", 4), "ää");
    }
}
