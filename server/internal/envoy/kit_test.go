package envoy_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

func folder(t testing.TB, files map[string]string) string {
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

// read reads rules that are right.
func read(t testing.TB, text string) *envoy.Rules {
	return kit.NoError(envoy.Read(t.Context(), filepath.Join(folder(t, map[string]string{"rules.yaml": text}), "rules.yaml")))(t)
}

// mistakes are the lines of an error, without the folder.
func mistakes(t testing.TB, files map[string]string) []string {
	dir := folder(t, files)
	_, err := envoy.Read(t.Context(), dir)
	require.Error(t, err)
	return strings.Split(strings.ReplaceAll(err.Error(), dir+string(filepath.Separator), ""), "\n")
}

// A book is a gate that lets everything pass, and has what was asked of it.
type book struct {
	charges   []service.GateCharge
	unmatched []string
}

func (b *book) Admit(_ context.Context, charges []service.GateCharge, blocked bool) (client.JointDecision, error) {
	b.charges = charges
	return client.JointDecision{Decision: client.Decision{Allowed: !blocked}, Decisions: make([]client.Decision, len(charges))}, nil
}

func (b *book) RefundAll(_ context.Context, charges []service.GateCharge) ([]client.Decision, error) {
	b.charges = charges
	return make([]client.Decision, len(charges)), nil
}

func (b *book) Unmatched(domain, keys string) {
	b.unmatched = append(b.unmatched, domain+": "+keys)
}

// ask sends descriptors to rules, and returns what the gate was asked.
func ask(t testing.TB, rules *envoy.Rules, descriptors ...*common.RateLimitDescriptor) (*pb.RateLimitResponse, *book) {
	b := &book{}
	answer := kit.NoError(envoy.New(b, rules).ShouldRateLimit(t.Context(), &pb.RateLimitRequest{Domain: "d", Descriptors: descriptors}))(t)
	return answer, b
}

// of is a descriptor: keys and values in turns.
func of(pairs ...string) *common.RateLimitDescriptor {
	d := &common.RateLimitDescriptor{}
	for i := 0; i < len(pairs); i += 2 {
		d.Entries = append(d.Entries, &common.RateLimitDescriptor_Entry{Key: pairs[i], Value: pairs[i+1]})
	}
	return d
}
