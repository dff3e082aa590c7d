package server

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/server/internal/envoy"
)

// readRules reads Envoy's rules, whose policies are there then.
func (s *Server) readRules(ctx context.Context) (*envoy.Rules, error) {
	rules, err := envoy.Read(ctx, s.config.EnvoyRules)
	if err == nil {
		err = s.databases.onEach(ctx, func(pool *pgxpool.Pool) error { return rules.Settle(ctx, pool) })
	}
	if err != nil {
		return nil, fmt.Errorf("ENVOY_RULES: %w", err)
	}
	s.log.Info("rules read", "path", s.config.EnvoyRules, "domains", rules.Domains(), "rules", rules.Count())
	return rules, nil
}

// Reload reads Envoy's rules again. If it cannot use them, the server goes on with those that it has.
func (s *Server) Reload(ctx context.Context) error {
	if s.envoy == nil {
		s.log.Info("nothing to read again: ENVOY_RULES is not set")
		return nil
	}
	rules, err := s.readRules(ctx)
	if err != nil {
		s.log.Error("the rules stay as they are", "error", err)
		return err
	}
	s.envoy.Use(rules)
	return nil
}
