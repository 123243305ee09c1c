//! Injected faults for recovery tests: `SWITCHYARD_FAULT=kill:20@1#1`.

use super::TrainError;
use switchyard_worker_contract::env;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Exit code 5.
    Exit,
    /// SIGKILL.
    Kill,
    /// SIGSTOP: alive, but silent.
    Hang,
    /// The training thread hangs, as on a lock that is never released: alive, with heartbeats.
    Stall,
    Panic,
}

/// A fault and its trigger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    kind: Kind,
    step: u64,
    rank: Option<u32>,
    attempt: Option<u32>,
}

impl Fault {
    /// Parses `KIND:STEP[@RANK][#ATTEMPT]`.
    ///
    /// # Errors
    /// The text has another form.
    pub fn parse(text: &str) -> Result<Fault, TrainError> {
        let invalid = || {
            TrainError::Usage(format!(
                "{}: got `{text}`; expected KIND:STEP[@RANK][#ATTEMPT] with KIND exit, kill, hang, stall or panic",
                env::FAULT
            ))
        };
        let (kind, rest) = text.split_once(':').ok_or_else(invalid)?;
        let (rest, attempt) = match rest.split_once('#') {
            Some((rest, attempt)) => (rest, Some(attempt.parse().map_err(|_| invalid())?)),
            None => (rest, None),
        };
        let (step, rank) = match rest.split_once('@') {
            Some((step, rank)) => (step, Some(rank.parse().map_err(|_| invalid())?)),
            None => (rest, None),
        };
        let kind = match kind {
            "exit" => Kind::Exit,
            "kill" => Kind::Kill,
            "hang" => Kind::Hang,
            "stall" => Kind::Stall,
            "panic" => Kind::Panic,
            _ => return Err(invalid()),
        };
        Ok(Fault { kind, step: step.parse().map_err(|_| invalid())?, rank, attempt })
    }

    /// Whether it is due now, before `step` (counted from 1).
    pub fn due(&self, step: u64, rank: u32, attempt: u32) -> bool {
        self.step == step && self.rank.is_none_or(|own| own == rank) && self.attempt.is_none_or(|own| own == attempt)
    }

    pub fn strike(&self) {
        use rustix::process::{Signal, getpid, kill_process};
        match self.kind {
            Kind::Exit => std::process::exit(5),
            Kind::Kill => drop(kill_process(getpid(), Signal::KILL)),
            Kind::Hang => drop(kill_process(getpid(), Signal::STOP)),
            Kind::Stall => loop {
                std::thread::park();
            },
            Kind::Panic => panic!("a fault was asked for by {}", env::FAULT),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Fault;

    #[test]
    fn valid_and_invalid_forms() {
        let fault = Fault::parse("kill:20@1#2").unwrap();
        assert!(fault.due(20, 1, 2) && !fault.due(20, 1, 1) && !fault.due(20, 0, 2) && !fault.due(19, 1, 2));
        assert!(Fault::parse("hang:3").unwrap().due(3, 7, 9) && Fault::parse("stall:3").is_ok());
        for text in ["kill", "kill:x", "burn:3", "kill:3@", "kill:3#x"] {
            assert!(Fault::parse(text).is_err(), "{text}");
        }
    }
}
