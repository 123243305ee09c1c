//! Progress of a command that can take long: a bar on a terminal, an occasional line elsewhere,
//! nothing if it is quick.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// Time before a bar is shown.
const BAR_DELAY: Duration = Duration::from_millis(500);
/// Time between two lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(30);

/// A kind of work with its amount.
pub(crate) struct Work {
    /// Such as `read`.
    pub verb: &'static str,
    /// Formats an amount.
    pub words: fn(u64) -> String,
    pub total: u64,
    /// Amount of work between two checks of the clock.
    pub stride: u64,
}

pub(crate) struct Progress {
    work: Work,
    done: u64,
    looked: u64,
    started: Instant,
    is_verbose: bool,
    bar: Option<ProgressBar>,
    last_line: Instant,
}

impl Progress {
    /// `is_verbose` is whether to show progress at all.
    pub(crate) fn new(is_verbose: bool, work: Work) -> Progress {
        let now = Instant::now();
        Progress { work, done: 0, looked: 0, started: now, is_verbose, bar: None, last_line: now }
    }

    pub(crate) fn advance(&mut self, by: u64) {
        self.done += by;
        if !self.is_verbose || self.done - self.looked < self.work.stride {
            return;
        }
        self.looked = self.done;
        let Work { verb, words, total, .. } = self.work;
        let amounts = || (words(self.done), words(total));
        if io::stderr().is_terminal() {
            if self.bar.is_none() && self.started.elapsed() >= BAR_DELAY {
                let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
                let style = ProgressStyle::with_template("{msg} [{bar:24}]   ETA {eta}");
                bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
                self.bar = Some(bar);
            }
            if let Some(bar) = &self.bar {
                let (done, total) = amounts();
                bar.set_message(format!("{verb} {done} of {total}"));
                bar.set_position(self.done);
            }
        } else if self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            let (done, total) = amounts();
            eprintln!("{verb}={done} of={total} elapsedS={}", self.started.elapsed().as_secs());
        }
    }

    pub(crate) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
