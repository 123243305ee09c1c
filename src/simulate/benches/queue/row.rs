//! One row of the table: the results of a rule over all inputs.

use crate::parts::Part;
use crate::{Input, ModelName};
use serde_json::{Map, Value, json};
use switchyard_simulate::measure::{Figures, deviation, mean};

pub(crate) struct Row<'a> {
    pub part: Part,
    pub input: &'a Input,
    pub model: ModelName,
    pub rule: &'a str,
    pub inputs: &'a [Figures],
    /// Seconds per input.
    pub seconds: f64,
    /// Longest decision of the rule, milliseconds.
    pub longest: f64,
}

pub(crate) const HEADER: &str = "rule                                completion, s     p99 wait  wait>=64  longest h  slowdown  slow %  idle %  frag %  util %  told %  held %  early %  window h  restarts  twice %  again h  lost %  urgent h  other h  short %  s/trace  pass ms";

impl Row<'_> {
    pub(crate) fn line(&self) -> String {
        let average = |get: fn(&Figures) -> f64| mean(self.all(get).into_iter());
        let known = |get: fn(&Figures) -> Option<f64>, unit: f64| {
            let of: Vec<f64> = self.inputs.iter().filter_map(get).collect();
            if of.is_empty() { "-".to_string() } else { format!("{:.1}", mean(of.into_iter()) / unit) }
        };
        format!(
            "{:32} {:>8.0} ± {:>6.0} {:>10.0} {:>9.0} {:>10.0} {:>9.1} {:>7.1} {:>7.1} {:>7.1} {:>7.1} {:>7} {:>7} {:>8} {:>9} {:>9.0} {:>8} {:>8} {:>7.1} {:>9} {:>8} {:>8} {:>8.2} {:>8.1}",
            self.rule,
            average(|figures| figures.completion_mean),
            deviation(&self.all(|figures| figures.completion_mean)),
            average(|figures| figures.wait_p99),
            average(|figures| figures.large_wait_mean),
            average(|figures| figures.wait_longest) / 3600.0,
            average(|figures| figures.slowdown),
            average(|figures| figures.slow_percent),
            average(|figures| figures.idle_percent),
            average(|figures| figures.fragmentation_percent),
            average(|figures| figures.utilisation_percent),
            known(|figures| figures.forecast_percent, 1.0),
            known(|figures| figures.forecast_coverage_percent, 1.0),
            known(|figures| figures.forecast_early_percent, 1.0),
            known(|figures| figures.forecast_width_median, 3600.0),
            average(|figures| f64::from(figures.restarts)),
            known(|figures| figures.stopped_again_percent, 1.0),
            known(|figures| figures.restart_wait_mean, 3600.0),
            average(|figures| figures.lost_percent),
            known(|figures| figures.urgent_wait_mean, 3600.0),
            known(|figures| figures.others_wait_mean, 3600.0),
            known(|figures| figures.short_percent, 1.0),
            self.seconds,
            self.longest,
        )
    }

    fn all(&self, get: fn(&Figures) -> f64) -> Vec<f64> {
        self.inputs.iter().map(get).collect()
    }

    pub(crate) fn json(&self) -> Result<Value, serde_json::Error> {
        let Input { trace, load, fabric, rows } = self.input;
        let mean = self.mean()?;
        Ok(json!({
            "part": self.part.name(), "trace": trace.name(), "load": load, "model": format!("{:?}", self.model).to_lowercase(), "rule": self.rule,
            "jobs": rows.len(), "gpus": fabric.gpus(), "leaves": fabric.leaves.len(), "seeds": self.inputs.len(),
            "urgentOneIn": self.part.urgent().map(|urgent| urgent.one_in),
            "nodeFailuresEveryDays": self.part.failures().map(|failures| failures.every / 86_400.0),
            "mean": mean, "completionDeviation": deviation(&self.all(|figures| figures.completion_mean)),
            "completionMeans": self.all(|figures| figures.completion_mean),
            "secondsPerTrace": self.seconds, "longestPassMilliseconds": self.longest,
        }))
    }

    /// The mean of each figure.
    fn mean(&self) -> Result<Value, serde_json::Error> {
        let inputs: Vec<Value> = self.inputs.iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
        let Some(Value::Object(first)) = inputs.first() else { return Ok(Value::Null) };
        let mean_of =
            |name: &String| match inputs.iter().filter_map(|figures| figures[name].as_f64()).collect::<Vec<_>>() {
                of if of.is_empty() => Value::Null,
                of => json!(mean(of.into_iter())),
            };
        Ok(Value::Object(first.keys().map(|name| (name.clone(), mean_of(name))).collect::<Map<_, _>>()))
    }
}
