//! Values that flags and variables take and that need more than a standard type's parser.

use std::str::FromStr;

/// A number of bytes: `268435456`, `256MiB`, `2G`; every suffix is a power of 1024.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, suffix) = text.split_at(digits);
        // "GB" may mean either; whoever writes it is asked instead of guessed at.
        let shift = match suffix {
            "" => 0,
            "K" | "KiB" => 10,
            "M" | "MiB" => 20,
            "G" | "GiB" => 30,
            _ => return Err("not a number of bytes, or one with K, M, G, KiB, MiB or GiB"),
        };
        let number: u64 = number.parse().map_err(|_| "not a number of bytes below 2^64")?;
        number.checked_mul(1 << shift).map(Self).ok_or("not a number of bytes below 2^64")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_binary_multiples() {
        for (text, bytes) in [
            ("0", 0),
            ("268435456", 256 << 20),
            ("256MiB", 256 << 20),
            ("256M", 256 << 20),
            ("3K", 3 << 10),
            ("3KiB", 3 << 10),
            ("2G", 2 << 30),
            ("2GiB", 2 << 30),
            ("17179869183G", 17_179_869_183 << 30),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in [
            "",
            "M",
            "1GB",
            "1 M",
            "-1",
            "+1",
            "1.5G",
            "1m",
            "17179869184G",
            "18446744073709551616",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
