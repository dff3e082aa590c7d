package policyfile_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// written is a policy in one line, as the database has it, too.
func written(p policyfile.Policy) string {
	if p.Lease != 0 {
		return fmt.Sprint(p.Name, " ", p.Capacity, " ", p.Durable, " ", p.Shadow, " ", p.Lease)
	}
	if p.Period != "" {
		return fmt.Sprint(p.Name, " ", p.Capacity, " ", p.Durable, " ", p.Remember, " ", p.Shadow, " ", p.Period, " ", p.TimeZone, " ", p.Anchor)
	}
	return fmt.Sprint(p.Name, " ", p.Capacity, " ", p.Refill, " ", p.Every, " ", p.Stepped, " ", p.Durable, " ", p.Remember, " ", p.Shadow)
}

// A document is a mapping of a file that a test has made up. Spans are text, and written with their value.
type document = map[string]any

// A madeSpan is a span and one of the ways to write it.
type madeSpan struct {
	text         string
	microseconds int64
}

// merge is what an environment makes of a file: the rule of the documentation, in a few lines of its own.
func merge(base, over document) document {
	merged := maps.Clone(base)
	for name, value := range over {
		inner, isDocument := value.(document)
		before, wasDocument := merged[name].(document)
		if isDocument && wasDocument {
			value = merge(before, inner)
		}
		merged[name] = value
	}
	return merged
}

// make up names of policies and keys: any text that the database stores.
var anyName = rapid.Custom(func(t *rapid.T) string {
	return rapid.OneOf(
		rapid.SampledFrom([]string{"api", "web", "42", "null", "~", "yes", "<<", "*a", "a: b", " a", "\"", "'", "é", "\u2028", "😀", "\n", "a\tb"}),
		rapid.StringN(1, 20, 100),
	).Filter(func(s string) bool { return s != "" && !strings.ContainsRune(s, 0) }).Draw(t, "name")
})

var anySpan = rapid.Custom(func(t *rapid.T) madeSpan {
	units := []string{"us", "ms", "s", "m", "h", "d", "w"}
	sizes := []int64{1, 1000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000, 604_800_000_000}
	var made madeSpan
	for range rapid.IntRange(1, 3).Draw(t, "parts") {
		i := rapid.IntRange(0, len(units)-1).Draw(t, "unit")
		n := rapid.Int64Range(1, 50).Draw(t, "n")
		made.text += fmt.Sprint(n, units[i])
		made.microseconds += n * sizes[i]
	}
	return made
})

// madePeriods and madeAnchors are texts of a file, and those of the database.
var (
	madePeriods = map[string]string{"1 day": "1 day", "2 weeks": "14 days", "12 months": "1 year", "1 month": "1 mon", "18 months": "1 year 6 mons", "1000 years": "1000 years"}
	madeAnchors = map[string]string{
		"2024-01-31": "2024-01-31 00:00:00", "2024-03-31T02:30:00": "2024-03-31 02:30:00", "9999-12-31T23:59:59.999999": "9999-12-31 23:59:59.999999",
		"0001-01-01T00:00:00": "0001-01-01 00:00:00", "2024-01-31T09:00:00.5": "2024-01-31 09:00:00.5",
	}
)

// isQuota and isSlots are the kind of the policies that are made up. It is that of their name, so that environments can replace fields.
func isQuota(name string) bool { return len(name)%3 == 0 }
func isSlots(name string) bool { return len(name)%3 == 1 }

// somePolicy has any of its fields, or all that a new one needs. Buckets of these numbers fill within 10,000 years.
func somePolicy(t *rapid.T, name string, complete bool) document {
	p := document{}
	set := func(field string, needed bool, value func() any) {
		if complete && needed || rapid.Bool().Draw(t, "has "+field) {
			p[field] = value()
		}
	}
	least := int64(0)
	if isSlots(name) {
		least = 1
		isLease := func(s madeSpan) bool { return s.microseconds >= 1000 }
		set("lease", true, func() any { return anySpan.Filter(isLease).Draw(t, "lease") })
	} else {
		set("remember", false, func() any { return anySpan.Draw(t, "remember") })
	}
	set("capacity", true, func() any { return rapid.Int64Range(least, 2000).Draw(t, "capacity") })
	bools := []string{"durable", "shadow"}
	switch {
	case isSlots(name):
	case isQuota(name):
		set("period", true, func() any { return rapid.SampledFrom(slices.Sorted(maps.Keys(madePeriods))).Draw(t, "period") })
		set("time_zone", false, func() any {
			return rapid.SampledFrom([]string{"UTC", "Europe/Berlin", "Etc/GMT+5"}).Draw(t, "time_zone")
		})
		set("anchor", false, func() any { return rapid.SampledFrom(slices.Sorted(maps.Keys(madeAnchors))).Draw(t, "anchor") })
	default:
		set("refill", true, func() any { return rapid.Int64Range(0, 9_000_000_000_000).Draw(t, "refill") })
		set("every", true, func() any { return anySpan.Draw(t, "every") })
		bools = append(bools, "stepped")
	}
	for _, field := range bools {
		set(field, false, func() any { return rapid.Bool().Draw(t, field) })
	}
	return p
}

func someOverride(t *rapid.T, policy string) document {
	o := somePolicy(t, policy, false)
	for _, field := range []string{"stepped", "durable", "shadow", "remember", "period"} {
		delete(o, field)
	}
	if rapid.Bool().Draw(t, "blocks") {
		o["capacity"] = int64(0)
	}
	if len(o) == 0 || rapid.Bool().Draw(t, "expires") {
		o["expires_at"] = rapid.SampledFrom([]string{
			"2999-12-31T23:59:59Z", "9999-12-31T23:59:59.999999-14:00", "2500-02-28T00:00:00.1+05:30",
		}).Draw(t, "expires_at")
	}
	return o
}

// someDocument is a file with policies and overrides, and an environment of each name given.
func someDocument(t *rapid.T, environments ...string) document {
	names := rapid.SliceOfNDistinct(anyName, 1, 5, rapid.ID[string]).Draw(t, "policies")
	base := document{"policies": document{}, "overrides": someOverrides(t, names)}
	for _, name := range names {
		base["policies"].(document)[name] = somePolicy(t, name, true)
	}
	if environments == nil {
		return base
	}
	sections := document{}
	for _, environment := range environments {
		over := document{"policies": document{}}
		known := slices.Clone(names)
		for _, name := range rapid.SliceOfNDistinct(anyName, 0, 3, rapid.ID[string]).Draw(t, "of "+environment) {
			isNew := !slices.Contains(names, name)
			over["policies"].(document)[name] = somePolicy(t, name, isNew)
			known = append(known, name)
		}
		for _, name := range names {
			if over["policies"].(document)[name] == nil && rapid.Bool().Draw(t, "replaces") {
				over["policies"].(document)[name] = somePolicy(t, name, false)
			}
		}
		over["overrides"] = someOverrides(t, known)
		sections[environment] = over
	}
	base["environments"] = sections
	return base
}

func someOverrides(t *rapid.T, policies []string) document {
	overrides := document{}
	for _, name := range policies {
		keys := rapid.SliceOfNDistinct(anyName, 0, 3, rapid.ID[string]).Draw(t, "keys")
		if len(keys) == 0 {
			continue
		}
		of := document{}
		for _, key := range keys {
			of[key] = someOverride(t, name)
		}
		overrides[name] = of
	}
	return overrides
}

func TestMain(m *testing.M) { pgtest.Main(m) }

var beyondASCII = regexp.MustCompile(`[\x7f-\x{ffff}]`)

// jsonOf writes JSON that is YAML, too: what YAML does not take as it is, is escaped.
func jsonOf(t require.TestingT, value any) string {
	switch value := value.(type) {
	case map[string]any:
		var fields []string
		for _, name := range slices.Sorted(maps.Keys(value)) {
			fields = append(fields, jsonOf(t, name)+": "+jsonOf(t, value[name]))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	case []any:
		var items []string
		for _, item := range value {
			items = append(items, jsonOf(t, item))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case madeSpan:
		return jsonOf(t, value.text)
	}
	data := kit.NoError(json.Marshal(value))(t)
	return beyondASCII.ReplaceAllStringFunc(string(data), func(s string) string { return fmt.Sprintf(`\u%04x`, []rune(s)[0]) })
}
