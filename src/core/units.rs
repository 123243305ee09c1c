//! Number formatting for terminals and reports: three significant digits, binary units for memory,
//! decimal units for rates.

/// A link speed: `400 Gbit/s (50 GB/s)`.
pub fn speed(megabits: u64) -> String {
    let gigabits = megabits as f64 / 1e3;
    format!("{} Gbit/s ({} GB/s)", three_digits(gigabits), three_digits(gigabits / 8.0))
}

/// Bytes in the largest binary unit that fits: `7.6 GiB`.
pub fn binary(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", three_digits(value), UNITS[unit])
}

/// Three significant digits without trailing zeros. Numbers of 100 and more are rounded to
/// integers.
pub fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Items per second: three significant digits, grouped from 1,000 on.
pub fn rate(value: f64) -> String {
    if value >= 1000.0 { grouped(value.round() as u64) } else { three_digits(value) }
}

/// A duration: `4.7s`, `47s`, `12m03s`, `2h04m`, `2d04h`.
pub fn duration(seconds: f64) -> String {
    if seconds < 9.95 {
        return format!("{:.1}s", seconds.max(0.0));
    }
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// An integer with thousands separators.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A fraction from 0 to 1 as a percentage.
pub fn percent(share: f64) -> String {
    format!("{} %", three_digits(100.0 * share))
}

/// Plural `s` for this count.
pub fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// A count with its noun.
pub fn counted(count: u64, word: &str) -> String {
    format!("{} {word}{}", grouped(count), plural(count))
}

/// A compact list of ranks: `0-3, 7`.
pub fn rank_list(ranks: impl IntoIterator<Item = u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let text = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    runs.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_numbers_and_bytes() {
        assert_eq!([0.26, 4.0].map(duration), ["0.3s", "4.0s"]);
        assert_eq!([47.2, 723.0, 7440.0, 187_200.0].map(duration), ["47s", "12m03s", "2h04m", "2d04h"]);
        assert_eq!([0, 999, 1000, 20_900, 1_234_567].map(grouped), ["0", "999", "1,000", "20,900", "1,234,567"]);
        assert_eq!([12, 3_355_444, 161_061_273_600].map(binary), ["12 bytes", "3.2 MiB", "150 GiB"]);
        assert_eq!([20_900.7, 812.4, 3.456].map(rate), ["20,901", "812", "3.46"]);
        assert_eq!([0.9733, 1.0, 0.58].map(percent), ["97.3 %", "100 %", "58 %"]);
        assert_eq!(speed(400_000), "400 Gbit/s (50 GB/s)");
        assert_eq!([counted(1, "core"), counted(2, "core")], ["1 core", "2 cores"]);
    }

    #[test]
    fn consecutive_ranks_become_a_range() {
        assert_eq!(rank_list([0, 1, 2, 3, 7]), "0-3, 7");
        assert_eq!(rank_list([]), "");
    }
}
