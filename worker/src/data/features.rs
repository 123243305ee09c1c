//! Normalisation of features.

use super::error::DataError;
use super::images::one_or_each;
use super::rows::Rows;
use switchyard_worker_contract::config::Features;

/// Largest magnitude of a feature: the square is finite, so training can use it in any precision.
const MAX: f32 = 1.8e19;

/// Normalises both splits. The statistics of [`Features::TrainingSplit`] are a function of the
/// samples and their order, so they are the same on all ranks and after a restart. Returns the
/// numbers used, one for each feature.
///
/// # Errors
/// Unusable numbers in the configuration, or a feature that is too large.
pub(super) fn normalise(
    config: &Features,
    train: &mut Rows<f32>,
    validation: Option<&mut Rows<f32>>,
) -> Result<Features, DataError> {
    let each = train.each;
    let given = match config {
        Features::Raw => None,
        Features::TrainingSplit => Some(statistics(train)),
        Features::Given { mean, deviation } => Some((
            one_or_each("spec.engine.data.normalisation.mean", mean, each, "features", false)?,
            one_or_each("spec.engine.data.normalisation.deviation", deviation, each, "features", true)?,
        )),
    };
    for rows in [Some(train), validation].into_iter().flatten() {
        for (sample, row) in rows.data.chunks_exact_mut(each).enumerate() {
            for (index, value) in row.iter_mut().enumerate() {
                let before = *value;
                if let Some((mean, deviation)) = &given {
                    *value = ((f64::from(before) - mean[index]) / deviation[index]) as f32;
                }
                if value.abs() > MAX {
                    let got = format!("nothing that scales {before:e}, feature {} of sample {sample}", index + 1);
                    let expected = format!("at most {MAX:e} after normalisation, for example by source: TrainingSplit");
                    return Err(DataError::value("spec.engine.data.normalisation", got, expected));
                }
            }
        }
    }
    Ok(given.map_or(Features::Raw, |(mean, deviation)| Features::Given { mean, deviation }))
}

/// Mean and standard deviation of each feature. A feature that does not vary has 1 as its
/// deviation, as in scikit-learn.
fn statistics(rows: &Rows<f32>) -> (Vec<f64>, Vec<f64>) {
    let count = rows.labels.len() as f64;
    let sums = |of: &dyn Fn(usize, f64) -> f64| {
        let mut sums = vec![0.0; rows.each];
        for row in rows.data.chunks_exact(rows.each) {
            for (index, value) in row.iter().enumerate() {
                sums[index] += of(index, f64::from(*value));
            }
        }
        sums
    };
    let mean: Vec<f64> = sums(&|_, value| value).into_iter().map(|sum| sum / count).collect();
    let squares = sums(&|index, value| (value - mean[index]).powi(2));
    let deviation = |sum: f64| Some((sum / count).sqrt()).filter(|deviation| *deviation > 0.0).unwrap_or(1.0);
    (mean, squares.into_iter().map(deviation).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(each: usize, data: &[f32]) -> Rows<f32> {
        Rows { each, data: data.to_vec(), labels: vec![0; data.len() / each] }
    }

    #[test]
    fn statistics_of_the_training_split_apply_to_both() {
        // The second feature does not vary.
        let mut train = rows(2, &[1e6, 7.0, 3e6, 7.0]);
        let mut validation = rows(2, &[2e6, 8.0]);
        let used = normalise(&Features::TrainingSplit, &mut train, Some(&mut validation)).expect("finite");
        assert_eq!(used, Features::Given { mean: vec![2e6, 7.0], deviation: vec![1e6, 1.0] });
        assert_eq!(train.data, [-1.0, 0.0, 1.0, 0.0]);
        assert_eq!(validation.data, [0.0, 1.0]);
    }

    #[test]
    fn given_numbers_are_for_all_features_or_for_each() {
        let given = |mean: &[f64], deviation: &[f64]| {
            let mut train = rows(2, &[1.0, -2.0]);
            let config = Features::Given { mean: mean.to_vec(), deviation: deviation.to_vec() };
            normalise(&config, &mut train, None).map(|_| train.data).map_err(|error| error.to_string())
        };
        assert_eq!(given(&[-1.0], &[2.0]).as_deref(), Ok([1.0, -0.5].as_slice()));
        assert_eq!(given(&[1.0, -2.0], &[2.0, 0.5]).as_deref(), Ok([0.0, 0.0].as_slice()));
        let text = given(&[0.0; 3], &[1.0]).expect_err("three of two");
        assert_eq!(
            text,
            "spec.engine.data.normalisation.mean: got 3 numbers: expected 1 or 2, the features of a sample"
        );
    }

    #[test]
    fn features_that_no_precision_can_train_on_are_refused() {
        let check = |config| normalise(config, &mut rows(1, &[1.0, 3e38]), None);
        let text = check(&Features::Raw).expect_err("too large").to_string();
        assert!(
            text.starts_with("spec.engine.data.normalisation: got nothing that scales 3e38, feature 1 of sample 1"),
            "{text}"
        );
        assert!(check(&Features::TrainingSplit).is_ok());
        assert!(check(&Features::Given { mean: vec![0.0], deviation: vec![1e-3] }).is_err());
    }
}
