package policyfile_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// Whatever a file has in it, parsing ends soon, with rules or with problems that have their places in it.
func FuzzParse(f *testing.F) {
	for _, m := range mistakes(f) {
		f.Add([]byte(m.file))
	}
	f.Add([]byte(valid))
	f.Add([]byte("a: &a [&b [*a, *b], *a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		tooLong := time.AfterFunc(30*time.Second, func() { panic(fmt.Sprintf("%d bytes take too long", len(data))) })
		file, err := policyfile.Parse("f", data)
		tooLong.Stop()
		checkProblems(t, data, err)
		if err != nil {
			return
		}
		for _, environment := range append(file.Environments(), "") {
			rules, err := file.Rules(environment)
			if err != nil || rules == nil {
				t.Fatalf("environment %q: %v", environment, err)
			}
			checkRules(t, rules)
		}
	})
}

// FuzzParseEnvoy is FuzzParse for rules of Envoy's alone.
func FuzzParseEnvoy(f *testing.F) {
	f.Add([]byte("domain: edge\ndescriptors:\n  - key: a\n    value: b\n    rate_limit: {unit: second, requests_per_unit: 5}\n"))
	f.Add([]byte("domain: edge\ndescriptors: [{key: a, descriptors: [{key: b*, share_threshold: true, rate_limit: {policy: p, replaces: [{name: c}]}}]}]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		domain, err := policyfile.ParseEnvoy("f", data)
		checkProblems(t, data, err)
		if err == nil {
			checkDomain(t, domain)
		}
	})
}

func checkProblems(t *testing.T, data []byte, err error) {
	var problems policyfile.Problems
	if err == nil {
		return
	}
	if !errors.As(err, &problems) || len(problems) == 0 {
		t.Fatalf("an error of another kind: %v", err)
	}
	for i, p := range problems {
		if p.File != "f" || p.Line < 1 || p.Column < 1 || p.Message == "" || p.Line > len(data)+1 || p.Column > len(data)+1 {
			t.Errorf("a problem that is nowhere: %v", p)
		}
		if i > 0 && (p.Line < problems[i-1].Line || p.Line == problems[i-1].Line && p.Column < problems[i-1].Column) {
			t.Errorf("not in the order of the file: %v", p)
		}
	}
}

// checkRules fails for what the database would refuse.
func checkRules(t *testing.T, rules *policyfile.Rules) {
	known := map[string]bool{}
	for _, p := range rules.Policies {
		known[p.Name] = true
		if !isName(p.Name) || p.Capacity < 1 || !areNumbers(p.Capacity, p.Refill, p.Every) || !isSpan(p.Remember) {
			t.Errorf("%+v", p)
		}
	}
	for _, o := range rules.Overrides {
		if !known[o.Policy] || !isName(o.Key) || !areNumbers(o.Capacity, o.Refill, o.Every) {
			t.Errorf("%+v", o)
		}
	}
	for _, route := range rules.HTTP.Routes {
		for _, c := range route.Charges {
			if !known[c.Policy] || c.Cost < 0 || c.Key.From == "" {
				t.Errorf("%+v", c)
			}
		}
	}
	for _, domain := range rules.Envoy {
		checkDomain(t, domain)
	}
}

func isName(name string) bool {
	return name != "" && len(name) <= 512 && !strings.ContainsRune(name, 0)
}

func isSpan(span policyfile.Span) bool { return span > 0 && span <= 365_250*policyfile.Day }

func areNumbers(capacity, refill int64, every policyfile.Span) bool {
	const most = 9_000_000_000_000
	return capacity >= 0 && capacity <= most && refill >= 0 && refill <= most && isSpan(every)
}

func checkDomain(t *testing.T, domain policyfile.EnvoyDomain) {
	if domain.Name == "" {
		t.Error("a domain without a name")
	}
	var check func(descriptors []policyfile.EnvoyDescriptor)
	check = func(descriptors []policyfile.EnvoyDescriptor) {
		for _, d := range descriptors {
			if d.Key == "" {
				t.Errorf("a descriptor without a key: %+v", d)
			}
			if l := d.Limit; l != nil && !l.Unlimited && (l.Policy == "") == (l.Unit.Span() == 0) {
				t.Errorf("a limit that is none, or two: %+v", l)
			}
			check(d.Descriptors)
		}
	}
	check(domain.Descriptors)
}
