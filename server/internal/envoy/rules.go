package envoy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// Rules decide requests.
type Rules struct {
	domains   map[string]*level
	list      []*rule             // in the order of the files
	described []policyfile.Policy // those of rules that name none
}

// A level has the descriptors for one entry of a request.
type level struct {
	descriptors map[string]*descriptor
	wildcards   []wildcard // in the order of the file: the first that matches counts
}

type wildcard struct {
	policyfile.EnvoyPattern
	*descriptor
}

type descriptor struct {
	rule  *rule // of requests that end here, or nil
	below *level

	// shared returns the value of the one bucket of a wildcard. It is nil if each match has its own bucket.
	shared func(key string) string
}

// A rule limits the descriptors that end at it.
type rule struct {
	policyfile.EnvoyLimit
	policy string // of its buckets; empty for an unlimited rule and for one that denies all requests
	shadow bool   // it alone denies nothing
	quota  bool   // it denies where all such rules of a request do
}

// isZero reports whether all requests are over the rule's limit.
func (r *rule) isZero() bool { return r.policy == "" && !r.Unlimited && (!r.shadow || r.quota) }

var units = map[policyfile.EnvoyUnit]pb.RateLimitResponse_RateLimit_Unit{}

func init() {
	for number, name := range pb.RateLimitResponse_RateLimit_Unit_name {
		units[policyfile.EnvoyUnit(strings.ToLower(name))] = pb.RateLimitResponse_RateLimit_Unit(number)
	}
}

// newRules builds the tree of rules. Its error is [policyfile.Problems].
func newRules(domains []policyfile.EnvoyDomain) (*Rules, error) {
	b := builder{rules: &Rules{domains: make(map[string]*level)}}
	b.rules.described, b.problems = policyfile.EnvoyPolicies(domains)
	for _, d := range domains {
		before := len(b.rules.list)
		b.rules.domains[d.Name] = b.level(d.Name, d.Descriptors)
		b.circles(b.rules.list[before:])
	}
	if b.problems != nil {
		slices.SortStableFunc(b.problems, func(p, q policyfile.Problem) int { return p.Compare(q.Position) })
		return nil, b.problems
	}
	return b.rules, nil
}

type builder struct {
	rules    *Rules
	problems policyfile.Problems
}

// circles reports rules that replace each other: a request that matches them all would have no limit.
func (b *builder) circles(rules []*rule) {
	replaces := make(map[string][]string)
	for _, r := range rules {
		if r.Name != "" && !r.Unlimited {
			replaces[r.Name] = append(replaces[r.Name], r.Replaces...)
		}
	}
	for _, r := range rules {
		reached := slices.Clone(r.Replaces)
		for i := 0; i < len(reached) && !r.Unlimited; i++ {
			for _, name := range replaces[reached[i]] {
				if !slices.Contains(reached, name) {
					reached = append(reached, name)
				}
			}
		}
		if r.Name != "" && slices.Contains(reached, r.Name) {
			b.problems.Add(r.At, "%q replaces itself or a rule that replaces it, and a request of both would have no limit: remove one of the two", r.Name)
		}
	}
}

func (b *builder) level(path string, descriptors []policyfile.EnvoyDescriptor) *level {
	l := &level{descriptors: make(map[string]*descriptor, len(descriptors))}
	for _, d := range descriptors {
		composite := d.Composite()
		built := &descriptor{below: b.level(path+"."+composite, d.Descriptors)}
		if d.Limit != nil {
			built.rule = b.rule(path+"."+composite, d)
		}
		if pattern := d.Pattern(); pattern != nil {
			l.wildcards = append(l.wildcards, wildcard{pattern, built})
			if d.ShareThreshold {
				built.shared = func(key string) string { return strings.TrimPrefix(composite, key+"_") }
			}
		}
		l.descriptors[composite] = built
	}
	return l
}

func (b *builder) rule(path string, d policyfile.EnvoyDescriptor) *rule {
	r := &rule{EnvoyLimit: *d.Limit, policy: d.Limit.PolicyAt(path), shadow: d.Watches, quota: d.Quota && !d.Limit.Unlimited}
	b.rules.list = append(b.rules.list, r)
	switch {
	case r.Policy != "" && r.shadow:
		b.problems.Add(d.At, "shadow_mode and quota_mode are for a rule with unit: policy %q watches if it is defined with shadow", r.policy)
	case r.policy == "" && !r.Unlimited && r.Overdraw:
		b.problems.Add(r.At, "nothing passes a rule of 0 requests, so there is nothing to overdraw: remove overdraw, or allow some requests")
	}
	return r
}

type match struct {
	*rule
	key string // of its bucket
}

// find returns the rule of a descriptor, or no rule. A rule matches a descriptor that ends at the rule's place in the tree.
func (r *Rules) find(domain string, entries []*common.RateLimitDescriptor_Entry) match {
	at := r.domains[domain]
	if at == nil {
		return match{}
	}
	var found *rule
	values := make([]string, len(entries))
	for i, entry := range entries {
		d := at.find(entry.GetKey(), entry.GetValue(), &values[i])
		if d == nil {
			return match{}
		}
		found, at = d.rule, d.below
	}
	if found == nil || found.policy == "" {
		return match{rule: found}
	}
	return match{found, bucketKey(entries, values)}
}

// find looks an entry up by key and value, then among the wildcards, then by key. It returns nil if nothing matches, and sets
// inBucket to the value in the bucket's key.
func (l *level) find(key, value string, inBucket *string) *descriptor {
	*inBucket = value
	composite := key + "_" + value
	if d := l.descriptors[composite]; d != nil {
		return d
	}
	for _, w := range l.wildcards {
		if w.Matches(composite) {
			if w.shared != nil {
				*inBucket = w.shared(key)
			}
			return w.descriptor
		}
	}
	return l.descriptors[key]
}

// Domains returns the number of domains.
func (r *Rules) Domains() int { return len(r.domains) }

// Count returns the number of rules.
func (r *Rules) Count() int { return len(r.list) }

// maxKey is the longest key of a bucket, in bytes.
const maxKey = 512

// bucketKey returns the JSON array of the entries' [key, value] pairs. A key that is too long is hashed: an error would let the
// request pass if Envoy is told to ignore errors, and clients choose the length of headers.
func bucketKey(entries []*common.RateLimitDescriptor_Entry, values []string) string {
	pairs := make([][2]string, len(entries))
	for i, entry := range entries {
		pairs[i] = [2]string{entry.GetKey(), values[i]}
	}
	key, _ := json.Marshal(pairs, jsontext.AllowInvalidUTF8(true)) // which both protocols reject
	if len(key) <= maxKey {
		return string(key)
	}
	sum := sha256.Sum256(key)
	return "sha256:" + hex.EncodeToString(sum[:]) // no array begins so
}

// Read reads the rules of a file, or of all .yaml and .yml files of a folder. A file is one of Envoy's reference service, or a
// policy file. The error has all mistakes.
func Read(path string) (*Rules, error) {
	paths, err := filesOf(path)
	if err != nil {
		return nil, err
	}
	var domains []policyfile.EnvoyDomain
	var errs []error
	for _, path := range paths {
		var some []policyfile.EnvoyDomain
		data, err := os.ReadFile(path)
		if err == nil {
			some, err = policyfile.ParseEnvoy(path, data)
		}
		if err != nil {
			errs = append(errs, err)
		}
		domains = append(domains, some...)
	}
	switch {
	case errs != nil:
		return nil, errors.Join(errs...)
	case len(domains) == 0: // policy files for pgratelimit apply
		return nil, fmt.Errorf("%s has no rule: write domain and descriptors, or in a policy file the section envoy", path)
	}
	return newRules(domains)
}

func filesOf(path string) (paths []string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		name := filepath.Join(path, entry.Name())
		extension := filepath.Ext(name)
		if strings.HasPrefix(entry.Name(), ".") { // as of a mounted ConfigMap
			continue
		}
		if entry.IsDir() {
			return nil, fmt.Errorf("%s is a folder in a folder of rules: move its files one up, or give it a name that begins with a dot", name)
		}
		if extension != ".yaml" && extension != ".yml" {
			return nil, fmt.Errorf("%s does not end in .yaml or .yml: rename it, or give it a name that begins with a dot", name)
		}
		paths = append(paths, name)
	}
	if paths == nil {
		return nil, fmt.Errorf("%s has no file whose name ends in .yaml or .yml", path)
	}
	return paths, nil
}

// Settle checks that the policies of all rules exist. It defines the policies that rules describe where they are missing or differ,
// if the role may. It is one transaction: an error changes nothing, and lists all that is wrong.
func (r *Rules) Settle(ctx context.Context, db *pgxpool.Pool) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// Servers that start together take turns.
		if _, err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgratelimit: rules of Envoy'))"); err != nil {
			return err
		}
		policies, err := policyfile.ReadPolicies(ctx, tx)
		if err != nil {
			return inspect.Described(err)
		}
		there := make(map[string]policyfile.Policy, len(policies))
		for _, p := range policies {
			there[p.Name] = p
		}
		return r.settle(ctx, tx, there)
	})
	if err != nil {
		return fmt.Errorf("policies of the rules: %w", err)
	}
	return nil
}

func (r *Rules) settle(ctx context.Context, tx pgx.Tx, there map[string]policyfile.Policy) error {
	var may bool
	err := tx.QueryRow(ctx, "select coalesce(pg_catalog.has_function_privilege(pg_catalog.to_regproc('ratelimit_define_policy')::oid, 'execute'), false)").Scan(&may)
	if err != nil {
		return err
	}
	var problems policyfile.Problems
	for _, want := range r.described {
		has, isThere := there[want.Name]
		whole := want.Over(has)
		switch {
		case isThere && whole.IsAs(has):
			continue
		case may:
			if err = whole.Define(ctx, tx); err != nil {
				return err
			}
		default:
			what := "is missing"
			if isThere {
				what = "has other numbers"
			}
			problems.Add(want.At, "policy %q %s, and this role may not define it. An administrator has to run: %s", want.Name, what, want.Statement())
		}
		there[want.Name] = want
	}
	for _, rule := range r.list {
		if rule.Policy == "" {
			continue
		}
		has, isThere := there[rule.Policy]
		if !isThere {
			problems.Add(rule.At, "there is no policy %q: define it first, or give the rule unit and requests_per_unit", rule.Policy)
		}
		if has.Values["lease"] != nil {
			problems.Add(rule.At, "policy %q lends slots, and has no tokens to take: write another policy", rule.Policy)
		}
		rule.shadow = has.Values["shadow"] == true
	}
	if problems != nil {
		return problems
	}
	return nil
}
