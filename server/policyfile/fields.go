package policyfile

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// Values are those of a policy or an override, by field: an int64, a bool, a [Span] or a text. Equal ones mean the same.
type Values map[string]any

// fields are those of the schema, in the order in which they are shown.
var fields = append(schema.find("$defs", "policy", "properties").inOrder(), schema.find("$defs", "override", "properties", "expires_at"))

// A form is of the values of all fields that refer to one definition of the schema.
type form struct {
	sqlType string // of the argument
	column  string // writes a column as a file may, whatever the session's DateStyle, IntervalStyle and TimeZone

	// read returns the value of a text, or nil. It may read texts that the schema's pattern refuses.
	read func(text string) any
}

const (
	spanColumn   = `(extract(epoch from %s) * 1000000.0)::bigint || 'us'`
	periodColumn = `coalesce(nullif(extract(year from %[1]s) * 12 + extract(month from %[1]s), 0) || ' months', extract(day from %[1]s) || ' days')`
)

// forms are by the name of the definition, which is also that of its format.
var forms = map[string]form{
	"tokens":   {"bigint", "%s::text", func(text string) any { n, _ := strconv.ParseInt(text, 10, 64); return n }},
	"boolean":  {"boolean", "%s::text", func(text string) any { return text == "true" }},
	"span":     {"interval", spanColumn, func(text string) any { return readSpan(text, Microsecond) }},
	"lease":    {"interval", spanColumn, func(text string) any { return readSpan(text, Millisecond) }},
	"period":   {"interval", periodColumn, readPeriod},
	"history":  {"interval", periodColumn, readPeriod},
	"timeZone": {"text", "%s", func(text string) any { return text }},
	"anchor":   {"timestamp", `to_char(%s, 'YYYY-MM-DD"T"HH24:MI:SS.US')`, readAnchor},
	"instant":  {"timestamptz", `to_char(%s at time zone interval '-15:59', 'YYYY-MM-DD"T"HH24:MI:SS.US"-15:59"')`, readInstant},
}

func formOf(field *node) form { return forms[path.Base(field.find("$ref").text())] }

// noHistory keeps no usage.
const noHistory = "0 days"

// add sets a field to the value of a text. A text that no file may have stays as it is.
func (v Values) add(field *node, text string) {
	v[field.name] = cmp.Or(formOf(field).read(text), any(text))
}

func (n *node) values() Values {
	values := make(Values)
	for _, field := range fields {
		if value := n.find(field.name); value != nil {
			values.add(field, value.text())
		}
	}
	return values
}

// with returns the values with others in place of those of the same fields.
func (v Values) with(others Values) Values {
	all := maps.Clone(v)
	maps.Copy(all, others)
	return all
}

// list writes each value with its field, in a format.
func (v Values) list(format string) string {
	var list []string
	for _, field := range fields {
		if value := v[field.name]; value != nil {
			list = append(list, fmt.Sprintf(format, field.name, value))
		}
	}
	return strings.Join(list, ", ")
}

// kind returns the name of the schema for such policies.
func (v Values) kind() string {
	switch {
	case v["lease"] != nil:
		return "slots"
	case v["period"] != nil:
		return "quota"
	}
	return "bucket"
}

// does says in messages what policies of each kind do.
var does = map[string]string{"bucket": "refills", "quota": "is a quota", "slots": "lends slots"}

// defaults are those of the schema, by kind, for fields that it does not forbid to the kind.
var defaults = map[string]Values{"bucket": defaultsOf("bucket"), "quota": defaultsOf("quota"), "slots": defaultsOf("slots")}

func defaultsOf(kind string) Values {
	forbidden := regexp.MustCompile(schema.find("$defs", kind, "patternProperties").inOrder()[0].name)
	values := make(Values)
	for _, field := range fields {
		if usual := field.find("default"); usual != nil && !forbidden.MatchString(field.name) {
			values.add(field, usual.text())
		}
	}
	return values
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

// readSpan adds the numbers with units in a text that has the schema's pattern, such as 1h30m.
func readSpan(text string, least Span) any {
	var span Span
	for _, part := range spanPart.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseInt(part[1], 10, 64)
		i := slices.IndexFunc(units, func(u unit) bool { return u.name == part[2] })
		if err != nil || i < 0 || n > int64(maxSpan/units[i].span) {
			return nil
		}
		span += Span(n) * units[i].span
		if span > maxSpan {
			return nil
		}
	}
	if span < least {
		return nil
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

// readPeriod reads a [client.Period], or noHistory, which the schema's pattern of a period refuses.
func readPeriod(text string) any {
	period, err := client.ParsePeriod(text)
	switch {
	case text == noHistory:
		return text
	case err != nil:
		return nil
	}
	return period.String()
}

// readAnchor reads a date, or a date with a time of day.
func readAnchor(text string) any {
	if !strings.Contains(text, "T") {
		text += "T00:00:00"
	}
	at, err := time.Parse(anchorLayout, text)
	if err != nil || at.Year() < 1 {
		return nil
	}
	return strings.TrimSuffix(at.Format(anchorLayout), "T00:00:00")
}

// readInstant returns an instant in UTC. If its year then has five digits, the zone is the one furthest behind that PostgreSQL reads.
func readInstant(text string) any {
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return nil
	}
	if at = at.UTC(); at.Year() > 9999 {
		at = at.In(time.FixedZone("", -(16*60-1)*60))
	}
	return at.Format(time.RFC3339Nano)
}
