package policyfile

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// formats are those that the schema names, beside a pattern. They know the calendar and the longest times.
var formats = map[string]func(string) bool{
	"span":    func(text string) bool { return parseSpan(text) > 0 },
	"lease":   func(text string) bool { return parseSpan(text) >= Millisecond },
	"period":  func(text string) bool { _, err := client.ParsePeriod(text); return err == nil },
	"anchor":  func(text string) bool { return parseAnchor(text) != "" },
	"instant": func(text string) bool { _, err := time.Parse(time.RFC3339Nano, text); return err == nil },
}

// A Span is a time in microseconds, up to 1000 years. A [time.Duration] ends at 292.
type Span int64

// The units of a Span.
const (
	Microsecond Span = 1
	Millisecond      = 1000 * Microsecond
	Second           = 1000 * Millisecond
	Minute           = 60 * Second
	Hour             = 60 * Minute
	Day              = 24 * Hour
	Week             = 7 * Day
)

const maxSpan = 365_250 * Day

type unit struct {
	name string
	span Span
}

// units are the units in a file, the largest first, and weeks, which String does not write.
var units = []unit{{"d", Day}, {"h", Hour}, {"m", Minute}, {"s", Second}, {"ms", Millisecond}, {"us", Microsecond}, {"w", Week}}

var spanPart = regexp.MustCompile(`([0-9]+)([a-z]+)`)

// parseSpan reads whole numbers with units, such as 1h30m. It returns 0 for anything else, and for more than 1000 years.
func parseSpan(text string) (span Span) {
	for _, part := range spanPart.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseInt(part[1], 10, 64)
		i := slices.IndexFunc(units, func(u unit) bool { return u.name == part[2] })
		if err != nil || i < 0 || n > int64(maxSpan/units[i].span) {
			return 0
		}
		if span += Span(n) * units[i].span; span > maxSpan {
			return 0
		}
	}
	return span
}

// String writes the span as a file does: 30d, 1h30m, 1s500ms.
func (s Span) String() string {
	if s <= 0 {
		return fmt.Sprintf("%dus", int64(s))
	}
	var text strings.Builder
	for _, unit := range units {
		if n := s / unit.span; n > 0 {
			fmt.Fprintf(&text, "%d%s", n, unit.name)
			s %= unit.span
		}
	}
	return text.String()
}

// MarshalText is String.
func (s Span) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

const anchorLayout = "2006-01-02T15:04:05.999999"

// parseAnchor reads a date, or a date with a time of day, and writes it as anchorText does. It returns "" for anything else.
func parseAnchor(text string) string {
	if !strings.Contains(text, "T") {
		text += "T00:00:00"
	}
	at, err := time.Parse(anchorLayout, text)
	if err != nil || at.Year() < 1 {
		return ""
	}
	return anchorText(at)
}

// anchorText writes an anchor as a file does.
func anchorText(at time.Time) string { return strings.TrimSuffix(at.Format(anchorLayout), "T00:00:00") }
