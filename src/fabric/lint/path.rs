//! Paths in a document.

use std::fmt;

/// A key of a map or an index of a list.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Index of a list, from 0.
    Index(usize),
    /// Key of a map.
    Key(String),
}

/// A field, as the steps to it from the top of the document. Displayed as
/// `spec.trainer.env[3].value`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path(Vec<Step>);

impl Path {
    /// The steps, outermost first.
    pub fn steps(&self) -> &[Step] {
        &self.0
    }

    pub fn key(&self, key: &str) -> Path {
        self.with(Step::Key(key.to_owned()))
    }

    pub fn index(&self, index: usize) -> Path {
        self.with(Step::Index(index))
    }

    /// The innermost list that contains this field.
    pub fn list(&self) -> Path {
        let last = self.0.iter().rposition(|step| matches!(step, Step::Index(_))).unwrap_or_default();
        Path(self.0[..last].to_vec())
    }

    fn with(&self, step: Step) -> Path {
        let mut steps = self.0.clone();
        steps.push(step);
        Path(steps)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(out, "[{index}]")?,
                Step::Key(key) if key.contains(['.', '[', ' ']) || key.is_empty() => write!(out, "[{key:?}]")?,
                Step::Key(key) if position == 0 => write!(out, "{key}")?,
                Step::Key(key) => write!(out, ".{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Path;

    #[test]
    fn paths_look_like_kubectls() {
        let path = Path::default().key("spec").key("env").index(3).key("value");
        assert_eq!(path.to_string(), "spec.env[3].value");
        assert_eq!(path.list().to_string(), "spec.env");
        assert_eq!(path.list().list(), Path::default());
        assert_eq!(Path::default().key("data").key("nccl.conf").to_string(), "data[\"nccl.conf\"]");
    }
}
