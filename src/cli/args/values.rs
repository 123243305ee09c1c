//! Parsers for command line values.

use switchyard_topology::import::NicRate;

/// Longest product name that a GPUTopology can hold.
const LONGEST_MODEL: usize = 128;

/// The name of a cluster-scoped object: a DNS subdomain.
pub(super) fn object_name(text: &str) -> Result<String, String> {
    let is_alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_label = |label: &str| {
        label.starts_with(is_alphanumeric)
            && label.ends_with(is_alphanumeric)
            && label.chars().all(|c| is_alphanumeric(c) || c == '-')
    };
    if text.len() <= 253 && text.split('.').all(is_label) {
        return Ok(text.to_owned());
    }
    Err("expected a node name: at most 253 lower-case letters, digits, `-` and `.`, where each part starts and ends with \
         a letter or digit, such as gpu-07"
        .to_owned())
}

/// A product name that a GPUTopology can hold.
pub(super) fn product_name(text: &str) -> Result<String, String> {
    let name = text.trim();
    if name.is_empty() || name.chars().any(char::is_control) || name.chars().count() > LONGEST_MODEL {
        return Err(format!("expected a product name of at most {LONGEST_MODEL} characters, such as H100"));
    }
    Ok(name.to_owned())
}

/// Parses a rate in Gbit/s: `400` or `mlx5_0=400`.
pub(super) fn nic_rate(text: &str) -> Result<NicRate, String> {
    let (nic, rate) = match text.split_once('=') {
        Some((nic, rate)) => (Some(nic.to_owned()), rate),
        None => (None, text),
    };
    let gigabits = rate.parse::<u32>().ok().filter(|rate| *rate > 0);
    match gigabits {
        Some(gigabits) if nic.as_deref() != Some("") => {
            Ok(NicRate { nic, megabits_per_second: u64::from(gigabits) * 1000 })
        }
        _ => Err("expected an integer rate in Gbit/s, for all NICs or for one: 400 or mlx5_0=400".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_name_accepts_dns_subdomains_only() {
        for good in ["imported", "gpu-07", "10.0.0.1", "a.b-c"] {
            assert_eq!(object_name(good).as_deref(), Ok(good));
        }
        for bad in ["", "-a", "a-", "A", "a_b", "a..b", "a.", "é", "a b", "x/y", &"a".repeat(254)] {
            assert!(object_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nic_rate_accepts_a_default_or_a_rate_per_nic() {
        assert_eq!(nic_rate("400"), Ok(NicRate { nic: None, megabits_per_second: 400_000 }));
        assert_eq!(nic_rate("mlx5_0=25"), Ok(NicRate { nic: Some("mlx5_0".into()), megabits_per_second: 25_000 }));
        for bad in ["", "0", "-1", "0.5", "=400", "mlx5_0=", "400G", "a=b=1"] {
            assert!(nic_rate(bad).is_err(), "{bad}");
        }
    }
}
