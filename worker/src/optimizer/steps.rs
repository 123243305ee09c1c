use switchyard_worker_contract::config::Rule;

/// Step count, and the powers of Adam's and LAMB's betas, by repeated multiplication: `powf` can
/// differ between machines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Steps {
    betas: (f64, f64),
    done: u64,
    powers: (f64, f64),
}

impl Steps {
    /// Zero steps of a rule.
    pub fn new(rule: &Rule) -> Steps {
        let betas = match rule {
            Rule::Sgd(_) | Rule::Lars(_) => (1.0, 1.0),
            Rule::Adam(n) | Rule::AdamW(n) | Rule::Lamb(n) => (n.beta1, n.beta2),
        };
        Steps { betas, done: 0, powers: (1.0, 1.0) }
    }

    pub fn done(&self) -> u64 {
        self.done
    }

    /// beta1 and beta2 to the power of the step count; 1 for a rule without betas.
    pub fn powers(&self) -> (f64, f64) {
        self.powers
    }

    /// One step later.
    #[must_use]
    pub fn next(self) -> Steps {
        let powers = (self.powers.0 * self.betas.0, self.powers.1 * self.betas.1);
        Steps { done: self.done + 1, powers, ..self }
    }

    /// After `done` steps in total, with the same multiplications as in training.
    #[must_use]
    pub fn restored(self, done: u64) -> Steps {
        let mut steps = Steps { done: 0, powers: (1.0, 1.0), ..self };
        while steps.done < done {
            let next = steps.next();
            if next.powers == steps.powers {
                break;
            }
            steps = next;
        }
        Steps { done, ..steps }
    }
}
