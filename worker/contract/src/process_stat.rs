//! Parses `/proc/PID/stat`.

/// Statistics of a process or thread, as in proc_pid_stat(5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat<'a> {
    /// Name of the program or thread.
    pub name: &'a str,
    /// `R` (running), `D` (uninterruptible sleep), `Z` (zombie) and so on.
    pub state: char,
    /// The fields after the state.
    rest: &'a str,
}

impl<'a> ProcessStat<'a> {
    /// Parses the file's text; `None` if it is malformed.
    pub fn parse(text: &'a str) -> Option<ProcessStat<'a>> {
        // The name is in parentheses and can contain any character.
        let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
        let rest = rest.trim_start();
        let state = rest.chars().next()?;
        Some(ProcessStat { name, state, rest: &rest[state.len_utf8()..] })
    }

    /// Whether it runs no code any more.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// CPU time in user and kernel mode, in clock ticks.
    pub fn cpu_ticks(&self) -> Option<u64> {
        Some(self.field(14)? + self.field(15)?)
    }

    /// Start in clock ticks after boot, which tells processes with the same id apart.
    pub fn start_ticks(&self) -> Option<u64> {
        self.field(22)
    }

    /// A field by its number in the manual page, in which the state is field 3.
    fn field(&self, number: usize) -> Option<u64> {
        self.rest.split_whitespace().nth(number - 4)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_after_any_name() {
        for name in ["sleep", "a) (b", "", "Z ) R"] {
            let text = format!("7 ({name}) S 4 5 6 7 8 9 10 11 12 13 140 15 16 17 18 19 20 21 2200 23\n");
            let stat = ProcessStat::parse(&text).unwrap();
            assert_eq!((stat.name, stat.state, stat.has_ended()), (name, 'S', false));
            assert_eq!((stat.cpu_ticks(), stat.start_ticks()), (Some(155), Some(2200)));
        }
        let ended = ProcessStat::parse("7 (w) Z 1").unwrap();
        assert_eq!((ended.has_ended(), ended.cpu_ticks(), ended.start_ticks()), (true, None, None));
        for malformed in ["", "7", "7 (w", "7 (w)", "7 (w) "] {
            assert_eq!(ProcessStat::parse(malformed), None, "{malformed:?}");
        }
    }
}
