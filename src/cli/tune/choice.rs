//! Decides between the manifest's settings and the best ones found.

use super::settings::{Field, Scope};
use super::trial::Trial;
use serde::Serialize;
use serde_json::{Value, json};
use switchyard_core::units::three_digits;

/// A smaller gain is not worth a change.
const LEAST_GAIN: f64 = 0.03;

/// The outcome: what was measured, and what to set.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tuned {
    pub trials: Vec<Trial>,
    /// Whether other settings than the manifest's are recommended.
    pub is_better: bool,
    /// Share of the step that they save, percent; measured in the last two trials.
    pub gain_percent: f64,
    /// How far two runs with equal settings differed, percent: the larger of both settings'.
    pub noise_percent: f64,
    /// A JSON merge patch of the TrainJob.
    pub patch: Value,
    /// Sentences.
    pub reasons: Vec<String>,
}

impl Tuned {
    /// `pair`: the positions of the last runs with the manifest's settings and with the best ones;
    /// `None` if these are the same.
    pub(super) fn of(trials: Vec<Trial>, pair: Option<(usize, usize)>, scope: &Scope) -> Tuned {
        let same = |reason: String, gain: f64, noise: f64, trials: Vec<Trial>| Tuned {
            trials,
            is_better: false,
            gain_percent: 100.0 * gain,
            noise_percent: 100.0 * noise,
            patch: json!({}),
            reasons: vec![reason],
        };
        let Some((own, best)) = pair else {
            let reason = match trials.len() {
                1 => "There is nothing to tune: one rank with one core.".to_owned(),
                _ => "No other settings had a shorter step: keep those of the manifest.".to_owned(),
            };
            return same(reason, 0.0, 0.0, trials);
        };
        let gain = 1.0 - trials[best].step_ms / trials[own].step_ms;
        let noise = noise(&trials, own).max(noise(&trials, best));
        if gain < LEAST_GAIN.max(noise) {
            let reason = format!(
                "The best settings save {:.1} % of the step, which is within the noise of {:.1} % or below {:.0} %: keep those of the manifest.",
                100.0 * gain,
                100.0 * noise,
                100.0 * LEAST_GAIN
            );
            return same(reason, gain, noise, trials);
        }
        let (mut patch, mut reasons) = (json!({}), Vec::new());
        for field in Field::ALL {
            let (from, to) = (trials[own].settings.get(field), trials[best].settings.get(field));
            if from != to {
                field.put(&mut patch, to);
                reasons.push(reason(&trials, field, (from.or(scope.planned(field)), to)));
            }
        }
        reasons.push(format!(
            "Together: {} instead of {} ms a step in the last two runs, {:.1} % less; equal settings differed by {:.1} %.",
            three_digits(trials[best].step_ms),
            three_digits(trials[own].step_ms),
            100.0 * gain,
            100.0 * noise
        ));
        Tuned { trials, is_better: true, gain_percent: 100.0 * gain, noise_percent: 100.0 * noise, patch, reasons }
    }
}

/// Relative difference of the last run to the first one with the same settings.
fn noise(trials: &[Trial], last: usize) -> f64 {
    let first = trials.iter().find(|trial| trial.settings == trials[last].settings);
    first.map_or(0.0, |first| (first.step_ms / trials[last].step_ms - 1.0).abs())
}

/// Compares the value with those of runs that differ in nothing else.
fn reason(trials: &[Trial], field: Field, (from, to): (Option<i32>, Option<i32>)) -> String {
    let word = |value: Option<i32>| value.map_or_else(|| "the default".to_owned(), |value| value.to_string());
    let with = trials.iter().position(|trial| trial.settings.get(field) == to);
    let before = with.and_then(|with| {
        let is_other = |trial: &&Trial| {
            trial.settings.get(field) != to && trial.settings.clone().with(field, to) == trials[with].settings
        };
        Some((&trials[with], trials[..with].iter().rfind(is_other)?))
    });
    let times = before.map_or_else(String::new, |(with, before)| {
        format!(
            ": {} ms a step, {} with {}",
            three_digits(with.step_ms),
            three_digits(before.step_ms),
            word(before.settings.get(field).or(from))
        )
    });
    format!("{} {} instead of {}{times}.", field.name(), word(to), word(from))
}

#[cfg(test)]
mod tests {
    use super::super::settings::Settings;
    use super::*;
    use switchyard_crds::TrainJob;

    fn own() -> Settings {
        let job: TrainJob = serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
            "spec": {"engine": {"model": {"type": "MLP", "mlp": {"hiddenSizes": [8]}}, "data": {"format": "Synthetic"}, "steps": 5}},
        }))
        .unwrap();
        Settings::of(&job)
    }

    fn trial(settings: &Settings, step_ms: f64) -> Trial {
        Trial { settings: settings.clone(), steps: 20, step_ms, step_ms_p99: step_ms, communication_ms: 0.0 }
    }

    /// Runs of the manifest's settings, of more threads, and of both again.
    fn tuned(step_ms: [f64; 4]) -> Tuned {
        let faster = own().with(Field::CpuThreads, Some(4));
        let settings = [own(), faster.clone(), own(), faster];
        let trials = settings.iter().zip(step_ms).map(|(settings, ms)| trial(settings, ms)).collect();
        Tuned::of(trials, Some((2, 3)), &Scope::new(1, 4, Some(2)))
    }

    #[test]
    fn settings_that_are_faster_twice_are_chosen_with_their_times() {
        let tuned = tuned([20.0, 10.0, 20.2, 10.1]);
        assert!(tuned.is_better);
        assert_eq!(tuned.patch, json!({"spec": {"trainer": {"cpuThreads": 4}}}));
        assert_eq!(tuned.reasons[0], "trainer.cpuThreads 4 instead of 1: 10 ms a step, 20 with 1.");
        assert!(tuned.reasons[1].contains("10.1 instead of 20.2 ms"), "{:?}", tuned.reasons);
    }

    #[test]
    fn a_gain_within_the_noise_changes_nothing() {
        // 10 % less, but the same settings were 30 % faster before.
        for step_ms in [[14.0, 13.0, 20.0, 18.0], [20.0, 19.0, 20.0, 19.6], [20.0, 10.0, 20.0, 22.0]] {
            let tuned = tuned(step_ms);
            assert!(!tuned.is_better && tuned.patch == json!({}), "{step_ms:?}: {tuned:?}");
            assert!(tuned.reasons[0].ends_with("keep those of the manifest."), "{:?}", tuned.reasons);
        }
    }

    #[test]
    fn without_a_faster_trial_the_settings_stay() {
        let tuned = |count: usize| Tuned::of(vec![trial(&own(), 5.0); count], None, &Scope::new(1, 1, None));
        assert!(tuned(1).reasons[0].contains("nothing to tune"));
        assert!(tuned(2).reasons[0].contains("keep those of the manifest"));
    }
}
