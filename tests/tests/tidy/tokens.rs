//! Paths, macros and keywords in Rust source, each with its line.
//!
//! Works on tokens instead of a syntax tree: macro arguments are tokens in both, and
//! `vec![crate::cli::X]` must count like any other use of `crate::cli`.

use proc_macro2::{Delimiter, LexError, Spacing, TokenStream, TokenTree};
use std::collections::BTreeSet;
use std::str::FromStr;

/// A path, macro or keyword in source text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mention {
    /// Segments without generic arguments: `crate`, `plan`, `Plan`. A keyword is a single segment.
    pub(crate) path: Vec<String>,
    /// Followed by `!`.
    pub(crate) is_macro: bool,
    /// Line number, from 1.
    pub(crate) line: usize,
    /// Inside an item that is compiled for tests only.
    pub(crate) in_test: bool,
}

/// Mentions of a file.
#[derive(Debug, Default)]
pub(crate) struct Mentions {
    /// In source order.
    pub(crate) all: Vec<Mention>,
    /// Modules in other files that are declared for tests only.
    pub(crate) test_modules: BTreeSet<String>,
}

/// Reported keywords.
const KEYWORDS: [&str; 4] = ["async", "await", "elapsed", "unsafe"];

/// Parses Rust source.
pub(crate) fn mentions(source: &str) -> Result<Mentions, LexError> {
    let tokens = TokenStream::from_str(source)?;
    let mut reader = Reader { found: Mentions::default() };
    reader.walk(tokens, false);
    Ok(reader.found)
}

struct Reader {
    found: Mentions,
}

impl Reader {
    fn emit(&mut self, path: Vec<String>, line: usize, is_macro: bool, in_test: bool) {
        self.found.all.push(Mention { path, is_macro, line, in_test });
    }

    fn walk(&mut self, stream: TokenStream, in_test: bool) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        let mut at = 0;
        // The next item is compiled for tests only.
        let mut test_item = false;
        while at < tokens.len() {
            let here_test = in_test || test_item;
            match &tokens[at] {
                TokenTree::Group(group) => {
                    self.walk(group.stream(), here_test);
                    test_item &= group.delimiter() != Delimiter::Brace;
                }
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    if let Some(TokenTree::Group(attribute)) = tokens.get(at + 1) {
                        test_item |= attribute.stream().to_string().replace(' ', "") == "cfg(test)";
                    }
                }
                TokenTree::Punct(punct) if matches!(punct.as_char(), ';' | ',') => {
                    if let Some(name) = module_name(&tokens, at).filter(|_| test_item) {
                        self.found.test_modules.insert(name);
                    }
                    test_item = false;
                }
                TokenTree::Ident(ident) => {
                    let line = ident.span().start().line;
                    let word = ident.to_string();
                    if word == "use" && !is_punct(tokens.get(at + 1), '<') {
                        let end = (at..tokens.len()).find(|at| is_punct(tokens.get(*at), ';')).unwrap_or(tokens.len());
                        self.use_tree(&tokens[at + 1..end], &[], line, here_test);
                        at = end;
                        continue;
                    }
                    if word == "extern" && tokens.get(at + 1).is_some_and(|next| next.to_string() == "crate") {
                        if let Some(name) = tokens.get(at + 2) {
                            self.emit(vec![name.to_string()], line, false, here_test);
                        }
                        at += 3;
                        continue;
                    }
                    if KEYWORDS.contains(&word.as_str()) {
                        self.emit(vec![word.clone()], line, false, here_test);
                    }
                    at = self.path(&tokens, at, here_test);
                    continue;
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Reads the path that starts at an identifier; returns the index after it. A single word is a
    /// path only as a macro name.
    fn path(&mut self, tokens: &[TokenTree], start: usize, in_test: bool) -> usize {
        let line = tokens[start].span().start().line;
        let mut path = vec![tokens[start].to_string()];
        let mut at = start + 1;
        while is_double_colon(tokens, at)
            && let Some(TokenTree::Ident(next)) = tokens.get(at + 2)
        {
            path.push(next.to_string());
            at += 3;
        }
        let is_macro = is_punct(tokens.get(at), '!') && !is_punct(tokens.get(at + 1), '=');
        // `.method::<T>()` and the `::method` of `<T as Trait>::method` are not separate paths;
        // `::name::x` is one.
        let continues = start > 0 && is_punct(tokens.get(start - 1), '.')
            || start > 2 && is_double_colon(tokens, start - 2) && is_punct(tokens.get(start - 3), '>');
        if !continues && (path.len() > 1 || is_macro) {
            self.emit(path, line, is_macro, in_test);
        }
        at
    }

    fn use_tree(&mut self, tokens: &[TokenTree], prefix: &[String], line: usize, in_test: bool) {
        let mut path = prefix.to_vec();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if *word == "as" => break,
                TokenTree::Ident(word) if *word == "self" && at == 0 && !prefix.is_empty() => {}
                TokenTree::Ident(word) => path.push(word.to_string()),
                TokenTree::Punct(punct) if punct.as_char() == '*' => path.push("*".into()),
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    for branch in inner.split(|token| is_punct(Some(token), ',')).filter(|branch| !branch.is_empty()) {
                        let line = branch[0].span().start().line;
                        self.use_tree(branch, &path, line, in_test);
                    }
                    return;
                }
                _ => {}
            }
        }
        self.emit(path, line, false, in_test);
    }
}

/// `NAME` if the token at `at` ends `mod NAME`.
fn module_name(tokens: &[TokenTree], at: usize) -> Option<String> {
    let name = tokens.get(at.checked_sub(1)?)?;
    let keyword = tokens.get(at.checked_sub(2)?)?;
    (keyword.to_string() == "mod").then(|| name.to_string())
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

fn is_double_colon(tokens: &[TokenTree], at: usize) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':' && punct.spacing() == Spacing::Joint)
        && is_punct(tokens.get(at + 1), ':')
}

#[test]
fn paths_are_found_anywhere() {
    let source = r##"
        use std::{fs, collections::{self, BTreeMap as Map}};
        use crate::plan::*;
        pub(crate) use super::model::X;
        extern crate kube;
        #[derive(thiserror::Error)]
        fn f<T: serde::Serialize>(x: Vec<crate::cli::Cli>) -> impl Fn() + use<T> {
            println!("{}", vec![jiff::Timestamp::now(); a::<b::C>::d]);
            x.iter().collect::<Vec<_>>();
            "crate::not::this"; // nor::this
            <T as one::Two>::three();
            ::rustix::process::id()
        }
        #[cfg(test)]
        mod tests { fn g() { tokio::spawn(async {}); } }
        #[cfg(test)]
        mod oracle;
        fn h() { after::tests(); }
    "##;
    let found = mentions(source).unwrap();
    let text = |mention: &Mention| {
        let mark = if mention.is_macro { "!" } else { "" };
        let test = if mention.in_test { " (test)" } else { "" };
        format!("{}{mark}{test}", mention.path.join("::"))
    };
    let all: Vec<String> = found.all.iter().map(text).collect();
    for wanted in [
        "std::fs",
        "std::collections",
        "std::collections::BTreeMap",
        "crate::plan::*",
        "super::model::X",
        "kube",
        "thiserror::Error",
        "serde::Serialize",
        "crate::cli::Cli",
        "println!",
        "jiff::Timestamp::now",
        "b::C",
        "one::Two",
        "rustix::process::id",
        "tokio::spawn (test)",
        "async (test)",
        "after::tests",
    ] {
        assert!(all.iter().any(|text| text == wanted), "{wanted} is missing: {all:?}");
    }
    for absent in ["crate::not::this", "nor::this", "T", "three"] {
        assert!(!all.iter().any(|text| text == absent), "{absent}: {all:?}");
    }
    assert_eq!(found.test_modules.iter().map(String::as_str).collect::<Vec<_>>(), ["oracle"]);
    assert!(found.all.iter().any(|mention| mention.path == ["async"]));
    assert_eq!(found.all[0].line, 2);
}
