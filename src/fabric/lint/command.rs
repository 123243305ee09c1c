//! Settings in command lines and scripts: variable assignments, and processes per node.

use super::view::{Count, Setting};
use crate::variables::is_name;

/// Launcher options that set the number of processes per node.
const PROCESS_OPTIONS: [&str; 2] = ["--nproc_per_node", "--nproc-per-node"];

/// Splits a command line into words at white space and command separators. Quotes and comments are
/// removed.
pub(super) fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote: Option<char> = None;
    let mut in_comment = false;
    let mut before = ' ';
    for letter in text.chars() {
        if in_comment {
            in_comment = letter != '\n';
            continue;
        }
        match quote {
            Some(open) if letter == open => quote = None,
            Some(_) => word.push(letter),
            None if letter == '"' || letter == '\'' => quote = Some(letter),
            None if letter == '#' && before.is_whitespace() => in_comment = true,
            None if letter.is_whitespace() || ";&|()\\".contains(letter) => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            None => word.push(letter),
        }
        before = letter;
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

/// Variables that words assign: `NAME=value`, also after `export`, `env` or mpirun's `-x`.
pub(super) fn assignments(words: &[String]) -> impl Iterator<Item = (&str, Setting)> {
    words.iter().filter_map(|word| {
        let (name, value) = word.split_once('=')?;
        is_name(name).then(|| (name, setting(value)))
    })
}

/// A value, unless it is built from other variables or the output of a command.
pub(super) fn setting(value: &str) -> Setting {
    if value.contains(['$', '`']) { Setting::Computed } else { Setting::Text(value.to_owned()) }
}

/// The number of processes per node that a command line requests, and the option that sets it.
pub(super) fn processes(words: &[String]) -> Option<(Count, String)> {
    words.iter().enumerate().find_map(|(index, word)| {
        let (option, value) = match word.split_once('=') {
            Some((option, value)) => (option, Some(value)),
            None => (word.as_str(), words.get(index + 1).map(String::as_str)),
        };
        let value = value.filter(|_| PROCESS_OPTIONS.contains(&option))?;
        Some((count(value), format!("{option}={value}")))
    })
}

/// Parses a process count in torchrun's form.
pub(super) fn count(text: &str) -> Count {
    match text.trim() {
        "gpu" => Count::PerGpu,
        text => text.parse().map_or(Count::Open, Count::Number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<String> {
        words(text)
    }

    #[test]
    fn words_exclude_comments_and_quotes() {
        let script =
            "# export NCCL_DEBUG=TRACE\nexport NCCL_IB_HCA=\"=mlx5_0,mlx5_1\"; NCCL_X=1&&torchrun a#b \\\n -c 'x y'";
        assert_eq!(all(script), ["export", "NCCL_IB_HCA==mlx5_0,mlx5_1", "NCCL_X=1", "torchrun", "a#b", "-c", "x y"]);
    }

    #[test]
    fn assignments_have_names_and_values() {
        let words = all("export A=1 B=$HOME -x C== --lr=2 a.b=3 =4 D=");
        let found: Vec<_> = assignments(&words).collect();
        let text = |value: &str| Setting::Text(value.into());
        assert_eq!(found, [("A", text("1")), ("B", Setting::Computed), ("C", text("=")), ("D", text(""))]);
    }

    #[test]
    fn processes_in_both_spellings() {
        let of = |text: &str| processes(&all(text)).map(|(count, _)| count);
        assert_eq!(of("torchrun --nproc_per_node=8 x.py"), Some(Count::Number(8)));
        assert_eq!(of("torchrun --nproc-per-node gpu x.py"), Some(Count::PerGpu));
        assert_eq!(of("torchrun --nproc-per-node $N x.py"), Some(Count::Open));
        assert_eq!(of("torchrun x.py --nproc_per_node"), None);
    }
}
